"""The families whose models have a program, one declaration each."""

from cbatch.model.programs.families import deepseek as deepseek
from cbatch.model.programs.families import experts as experts
from cbatch.model.programs.families import gemma as gemma
from cbatch.model.programs.families import gemma4 as gemma4
from cbatch.model.programs.families import glm as glm
from cbatch.model.programs.families import gpt as gpt
from cbatch.model.programs.families import granite as granite
from cbatch.model.programs.families import lfm as lfm
from cbatch.model.programs.families import llama as llama
from cbatch.model.programs.families import mamba_hybrid as mamba_hybrid
from cbatch.model.programs.families import parallel as parallel
from cbatch.model.programs.families import post_norm as post_norm
from cbatch.model.programs.families import qwen_hybrid as qwen_hybrid
