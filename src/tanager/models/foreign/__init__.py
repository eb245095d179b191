"""Which tensors of other libraries are which of ours."""
