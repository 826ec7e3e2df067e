"""LoRA adapters in the steps of a model: which linears they add to, and how, on a CPU, on a device, in transformers."""
