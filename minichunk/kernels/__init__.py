"""The GPU operations of the decoder, one per file: a Triton kernel and its torch reference side by
side. The `model` room calls the public functions with `backend="torch"` or `"triton"`."""
