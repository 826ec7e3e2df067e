"""Matrix products: the inner loops, linears with packed weights, and mixtures of experts."""
