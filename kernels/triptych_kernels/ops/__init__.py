"""The public contract of every op: checks its arguments and calls the implementation for their device."""

# ruff: noqa: F403 (each family lists its ops in `__all__`)

from triptych_kernels.ops.attention import *
from triptych_kernels.ops.elementwise import *
from triptych_kernels.ops.encode_attention import *
from triptych_kernels.ops.latent_attention import *
from triptych_kernels.ops.linear import *
from triptych_kernels.ops.moe import *
from triptych_kernels.ops.recurrent import *
from triptych_kernels.ops.sampling import *
