"""The decoder's operations, one per file: a Triton kernel for GPUs, a call of a C++ kernel for CPUs
(`cpp/`) and their torch reference side by side. The `model` room calls the public functions with
`backend="triton"`, `"cpp"` or `"torch"`.

To read them, begin with the small ones (`rms_norm`, `swiglu`, `rope`, `sampling`), then `attention`
with its `attention_metadata`, `split_kv` and `tiles`. `backend` says which implementation serves;
`_cpp` compiles the C++ kernels when they are first used, `ahead_of_time` the Triton kernels for
GPUs that are not there. Nothing is imported here, so that
each operation costs only what it needs.
"""
