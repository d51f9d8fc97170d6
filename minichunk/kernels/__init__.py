"""The GPU operations of the decoder, one per file: a Triton kernel and its torch reference side by
side. The `model` room calls the public functions with `backend="torch"` or `backend="triton"`.

To read them, begin with the small ones (`rms_norm`, `swiglu`, `rope`, `sampling`), then `attention`
with its `attention_metadata`, `split_kv` and `tiles`. `backend` says which implementation serves;
`ahead_of_time` compiles the kernels for GPUs that are not there. Nothing is imported here, so that
each operation costs only what it needs.
"""
