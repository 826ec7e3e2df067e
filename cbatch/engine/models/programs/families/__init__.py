"""The families whose models have a program, one declaration each."""

from cbatch.engine.models.programs.families import deepseek as deepseek
from cbatch.engine.models.programs.families import experts as experts
from cbatch.engine.models.programs.families import gemma as gemma
from cbatch.engine.models.programs.families import gemma4 as gemma4
from cbatch.engine.models.programs.families import glm as glm
from cbatch.engine.models.programs.families import gpt as gpt
from cbatch.engine.models.programs.families import granite as granite
from cbatch.engine.models.programs.families import lfm as lfm
from cbatch.engine.models.programs.families import llama as llama
from cbatch.engine.models.programs.families import mamba_hybrid as mamba_hybrid
from cbatch.engine.models.programs.families import parallel as parallel
from cbatch.engine.models.programs.families import post_norm as post_norm
from cbatch.engine.models.programs.families import qwen_hybrid as qwen_hybrid
