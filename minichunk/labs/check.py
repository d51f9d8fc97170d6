"""Every check of the course by its exercise's name: `check.static_steps(static_steps)`."""

from minichunk.labs.batching import continuous_policy as continuous_policy
from minichunk.labs.batching import idle_share as idle_share
from minichunk.labs.batching import static_steps as static_steps
from minichunk.labs.chunk_size import align_chunk as align_chunk
from minichunk.labs.chunk_size import choose_chunk as choose_chunk
from minichunk.labs.chunk_size import kv_tokens_read as kv_tokens_read
from minichunk.labs.chunking import chunk_bounds as chunk_bounds
from minichunk.labs.chunking import chunk_mask as chunk_mask
from minichunk.labs.chunking import decode_first_policy as decode_first_policy
from minichunk.labs.chunking import find_stalls as find_stalls
from minichunk.labs.chunking import prefill_flops as prefill_flops
from minichunk.labs.chunking import split_gap as split_gap
from minichunk.labs.fairness import jain_index as jain_index
from minichunk.labs.fairness import token_counters as token_counters
from minichunk.labs.fairness import weighted_fair as weighted_fair
from minichunk.labs.mixing import capped_policy as capped_policy
from minichunk.labs.mixing import choose_preset as choose_preset
from minichunk.labs.mixing import prefill_steps as prefill_steps
from minichunk.labs.orders import aged_key as aged_key
from minichunk.labs.orders import length_predictor as length_predictor
from minichunk.labs.orders import serve_until_they_leave as serve_until_they_leave
from minichunk.labs.split_fuse import context_per_token as context_per_token
from minichunk.labs.split_fuse import feedback_policy as feedback_policy
from minichunk.labs.split_fuse import fuse_step as fuse_step
