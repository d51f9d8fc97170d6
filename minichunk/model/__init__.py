"""The real executor: weights, decoder, KV tensors, sampler, CUDA graphs, and text out of tokens.

To read along a step: `executor`, `batch`, `decoder`, `sampler`. To see where a model comes from:
`resolve`, `config`, `weights`, `loading`.
"""
