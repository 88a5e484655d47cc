"""``model`` and ``tokens``: a block of a tensor-parallel model, over a fake group of two ranks."""

from conftest import make_fake_group
from factories import rms_norm

make_fake_group(2)
model, (tokens,) = rms_norm()
