"""The architectures of GGUF files that are read, one declaration each."""

from cbatch.model.formats.gguf_architectures import gemma as gemma
from cbatch.model.formats.gguf_architectures import hybrid as hybrid
from cbatch.model.formats.gguf_architectures import llama as llama
from cbatch.model.formats.gguf_architectures import others as others
from cbatch.model.formats.gguf_architectures import qwen as qwen
