"""The architectures of GGUF files that are read, one declaration each."""

from cbatch.engine.models.formats.gguf_architectures import gemma as gemma
from cbatch.engine.models.formats.gguf_architectures import hybrid as hybrid
from cbatch.engine.models.formats.gguf_architectures import llama as llama
from cbatch.engine.models.formats.gguf_architectures import others as others
from cbatch.engine.models.formats.gguf_architectures import qwen as qwen
