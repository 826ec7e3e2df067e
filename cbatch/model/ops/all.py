"""All that programs are made of: the operations and what stands in them."""

from __future__ import annotations

from cbatch.model.ops.attention import Attend as Attend
from cbatch.model.ops.attention import HeadNorms as HeadNorms
from cbatch.model.ops.attention import PrepareHeads as PrepareHeads
from cbatch.model.ops.convolution import ShortConvolution as ShortConvolution
from cbatch.model.ops.embed import AddImage as AddImage
from cbatch.model.ops.embed import Embed as Embed
from cbatch.model.ops.experts import Experts as Experts
from cbatch.model.ops.experts import Route as Route
from cbatch.model.ops.gate import Gate as Gate
from cbatch.model.ops.gated_delta import GatedDelta as GatedDelta
from cbatch.model.ops.gather import Gather as Gather
from cbatch.model.ops.head import Head as Head
from cbatch.model.ops.linear import Linear as Linear
from cbatch.model.ops.normalize import GatedNorm as GatedNorm
from cbatch.model.ops.normalize import Normalize as Normalize
from cbatch.model.ops.operation import Operation as Operation
from cbatch.model.ops.program import Program as Program
from cbatch.model.ops.program import Rotary as Rotary
from cbatch.model.ops.selective_scan import SelectiveScan as SelectiveScan
from cbatch.model.weight import RESIDUAL as RESIDUAL
from cbatch.model.weight import Activation as Activation
from cbatch.model.weight import Matrix as Matrix
from cbatch.model.weight import Norm as Norm
from cbatch.model.weight import Weight as Weight
