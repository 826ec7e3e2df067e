"""The families whose models have a program, one declaration each."""

from cbatch.engine.models.families import deepseek as deepseek
from cbatch.engine.models.families import experts as experts
from cbatch.engine.models.families import gemma as gemma
from cbatch.engine.models.families import glm as glm
from cbatch.engine.models.families import gpt as gpt
from cbatch.engine.models.families import granite as granite
from cbatch.engine.models.families import llama as llama
from cbatch.engine.models.families import parallel as parallel
from cbatch.engine.models.families import post_norm as post_norm
