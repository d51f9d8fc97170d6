"""The convenient front door: text in, text out, on one engine that other code may use as well.

`LLM` puts the pieces together (model, executor, engine, tokenizer) and owns nothing of the
scheduling. Everything it returns is read from the trace, so it does not matter who turns the
engine's crank: `generate`, several interleaved streams, or the caller's own `llm.engine.step()`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from minichunk.core.config import EngineConfig
from minichunk.core.engine import Engine, QueueFullError
from minichunk.core.metrics import request_metrics
from minichunk.core.request import SamplingParams
from minichunk.core.trace import RequestRecord, Trace
from minichunk.model.config import check_sliding_window
from minichunk.model.detokenize import StopStrings, TextStream
from minichunk.model.errors import ModelError as ModelError
from minichunk.model.loading import describe_device, load_executor, missed_kernels
from minichunk.model.memory import default_num_blocks
from minichunk.model.outputs import (
    LogitGap,
    Prompt,
    RequestOutput,
    StreamEvent,
    listed,
    params_for,
)
from minichunk.model.resolve import DEFAULT_MODEL, ResolvedModel, resolve_model
from minichunk.sim.cost import StepCounter
from minichunk.sim.shapes import ModelShape

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from minichunk.model.config import ModelConfig

Events = Generator[StreamEvent, None, None]


class LLM:
    """A model with an engine around it.

    `model` is a short name, a hub id, the path of a folder or of a .gguf file, or a configuration
    object (random weights). `engine_knobs` are the fields of `EngineConfig`: policy, order,
    max_num_batched_tokens, chunk_size, max_num_seqs, block_size, num_blocks, … ; `preset` sets
    several of them at once. `num_blocks=None` lets memory decide (on a GPU: `memory_fraction`).
    `backend` chooses the kernels: "triton" (GPUs), "cpp" (CPUs, on Linux with g++), "torch", or
    "auto", the best that runs here. `compile` passes what lies between the attention calls through
    torch.compile, but not with "cpp", whose kernels are compiled already.

    Raises:
        ModelError: the model cannot be found, read, or fitted into memory (one line, for users).
        ValueError: engine knobs that are unknown or clash.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig | PretrainedConfig = DEFAULT_MODEL,
        *,
        preset: str | None = None,
        device: str = "auto",
        backend: str = "auto",
        dtype: str | torch.dtype = "auto",
        compile: bool = False,
        cuda_graphs: bool = True,
        memory_fraction: float = 0.9,
        quiet: bool = False,
        **engine_knobs: Any,
    ) -> None:
        # In a notebook rich would leave an empty output widget behind each status line.
        console = Console(stderr=True, quiet=quiet, force_jupyter=False)
        wanted = EngineConfig.make(preset, **engine_knobs)  # before the download, not after it

        status = console.status("reading the model")

        def say(line: str) -> None:
            status.stop()  # downloads draw progress bars of their own
            console.print(line, style="dim", markup=False, highlight=False)

        with status:
            resolved = resolve_model(model, seed=wanted.seed, say=say)
        with console.status("loading the weights") as loading:
            self.executor = load_executor(
                resolved,
                device=device,
                backend=backend,
                dtype=dtype,
                compiled=compile,
                cuda_graphs=cuda_graphs,
                begin=loading.update,
            )
        if resolved.notice:
            console.print(resolved.notice, style="bold yellow", markup=False, highlight=False)
        if missed := missed_kernels(backend, self.executor):
            say(f"slower than it could be: {missed}")
        if compile and self.executor.backend == "cpp":
            say("compile=True changes nothing here: the C++ kernels are compiled already")
        elif compile:
            say("torch.compile is on: the first steps are slow while pieces are compiled")
        self.notice = resolved.notice
        self.model_name = resolved.name
        self.model_origin = resolved.origin
        self.model_path = resolved.tensors.description
        self.model_config = resolved.config
        self.tokenizer = resolved.tokenizer
        self._memory_fraction = memory_fraction
        self._counter = StepCounter(shape_of(resolved), element_size=self.executor.dtype.itemsize)
        self._wanted = wanted
        self._pool_tokens: int | None = None  # what memory allows, found out when first needed
        self.engine = self.new_engine()

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration, with the defaults that the model and memory decided."""
        return self.engine.config

    @property
    def trace(self) -> Trace:
        """What this LLM has served so far, as rows: metrics, stalls, timeline."""
        return self.engine.trace

    def new_engine(self, **overrides: Any) -> Engine:
        """A fresh engine (empty block pool and prefix cache) over the same model.

        `overrides` replace this LLM's engine knobs. Only one engine at a time may have unfinished
        requests: they share the KV tensors.
        """
        known = {field.name for field in fields(EngineConfig)}
        if unknown := sorted(set(overrides) - known):
            raise ValueError(
                f"unknown engine option {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        config = self._sized(replace(self._wanted, **overrides))
        assert config.num_blocks is not None
        self.executor.reserve(config.num_blocks, config.block_size)
        return Engine(
            self.executor,
            config,
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=self.model_config.eos_token_ids,
            stop_check=StopStrings(self.tokenizer),
            annotate=self._counter,
            meta={
                "model": self.model_name,
                "model_origin": self.model_origin,
                "device": str(self.executor.device),
                "device_name": describe_device(self.executor.device),
                "dtype": str(self.executor.dtype).removeprefix("torch."),
                "backend": self.executor.backend,
            },
        )

    def _sized(self, config: EngineConfig) -> EngineConfig:
        """Fill in what depends on the model and on memory: max_model_len and num_blocks."""
        limit = self.model_config.max_model_len
        length = config.max_model_len or limit
        if length > limit:
            raise ValueError(
                f"max_model_len={length} is more than the {limit} positions that "
                f"{self.model_name} was made for: lower it"
            )
        check_sliding_window(self.model_config, length)
        blocks = config.num_blocks or self._blocks_in_memory(config, length)
        return replace(config, max_model_len=length, num_blocks=blocks)

    def _blocks_in_memory(self, config: EngineConfig, max_model_len: int) -> int:
        """A pool as large as memory allows; measured once, so that all engines get the same."""
        if self._pool_tokens is None:
            blocks = default_num_blocks(
                self.executor,
                block_size=config.block_size,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=max_model_len,
                memory_fraction=self._memory_fraction,
            )
            self._pool_tokens = blocks * config.block_size
        return max(1, self._pool_tokens // config.block_size)

    # Asking ------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or many prompts (text or token ids); the outputs are in the prompts' order.

        `params` may be a list with one entry per prompt. Raises ValueError for a prompt that could
        never be served; then none of this call's requests stays in the engine.
        """
        many = listed(prompts)
        each = params_for(many, params)
        texts = [prompt if isinstance(prompt, str) else None for prompt in many]
        token_ids = [self.encode(prompt) for prompt in many]
        names: list[str] = []
        try:
            for ids, param in zip(token_ids, each, strict=True):
                names.append(self._add(ids, param))
            for name in names:
                self._run_until(name)
        finally:
            for name in names:
                self.engine.cancel(name)  # does nothing unless we were interrupted
        metrics = request_metrics(self.trace)
        outputs = []
        for name, text, ids, param in zip(names, texts, token_ids, each, strict=True):
            record = self.trace.requests[name]
            tokens = tuple(record.output_token_ids or ())
            outputs.append(
                RequestOutput(
                    request_id=name,
                    prompt=text,
                    prompt_token_ids=tuple(ids),
                    text=self._text_of(tokens, param),
                    token_ids=tokens,
                    finish_reason=record.finish_reason or "",
                    metrics=metrics[name],
                    note=record.note,
                )
            )
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Events:
        """Answer one prompt, token by token. Closing the generator early cancels the request.

        The request is added at once, so its errors are raised here and not at the first event.
        Several streams can be read in turns; they share the engine's steps.
        """
        params = params or SamplingParams()
        events = self._events(self._add(self.encode(prompt), params), params)
        next(events)  # enters its `try`, so that closing cancels even before the first event
        return events

    def chat(
        self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None
    ) -> RequestOutput:
        """Answer a conversation of {"role": ..., "content": ...}, in the model's chat format."""
        return self.generate([self.encode_chat(messages)], params)[0]

    def encode(self, prompt: Prompt) -> list[int]:
        """A prompt's token ids; token ids pass through."""
        if not isinstance(prompt, str):
            return list(prompt)
        return self._needed_tokenizer().encode(prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the model's answer begins."""
        tokenizer = self._needed_tokenizer()
        if not tokenizer.chat_template:
            raise ValueError(f"{self.model_name} has no chat template: use generate or stream")
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        return tokenizer.encode(text, add_special_tokens=False)

    def logit_gap(
        self, token_ids: Sequence[int], a: int | None = None, b: int | None = None
    ) -> LogitGap:
        """The logits of two candidates (default: the likeliest two) for the token that comes next.

        Explains where two runs part: in bfloat16 a tiny gap is a near tie that rounding decides.
        """
        logits = self.executor.prompt_logits(list(token_ids)).float()
        likeliest = logits.topk(2).indices.tolist()
        first = likeliest[0] if a is None else a
        second = next(token for token in likeliest if token != first) if b is None else b
        return LogitGap(first, second, float(logits[first]), float(logits[second]))

    # Turning the crank ---------------------------------------------------------------------------

    def _add(self, token_ids: Sequence[int], params: SamplingParams) -> str:
        """Add a request; where the queue is at its bound, work until there is room."""
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop={params.stop!r}: {self.model_name} has no tokenizer")
        while True:
            try:
                return self.engine.add_request(token_ids, params)
            except QueueFullError:
                self.engine.step()

    def _run_until(self, request_id: str) -> RequestRecord:
        record = self.trace.requests[request_id]
        while record.finish_reason is None:
            self.engine.step()
        return record

    def _events(self, request_id: str, params: SamplingParams) -> Events:
        engine = self.engine  # the one that has the request, even if `llm.engine` is replaced
        record = engine.trace.requests[request_id]
        tokens = record.output_token_ids
        assert tokens is not None
        text = TextStream(self.tokenizer, params.stop) if self.tokenizer else None
        num_seen = num_shown = 0
        is_last = False
        try:
            yield StreamEvent("", None)  # taken by `stream`
            while not is_last:
                while num_seen == len(tokens) and record.finish_reason is None:
                    engine.step()
                token = tokens[num_seen] if num_seen < len(tokens) else None
                num_seen += token is not None
                is_last = num_seen == len(tokens) and record.finish_reason is not None
                new = ""
                if text is not None:
                    text.feed(tokens[:num_seen])
                    if is_last:
                        text.finish()
                    new, num_shown = text.text[num_shown:], len(text.text)
                yield StreamEvent(new, token, record.finish_reason if is_last else None)
        finally:
            engine.cancel(request_id)  # does nothing if it has finished

    def _text_of(self, token_ids: Sequence[int], params: SamplingParams) -> str:
        if self.tokenizer is None:
            return ""
        text = TextStream(self.tokenizer, params.stop)
        text.feed(token_ids)
        return text.finish()

    def _needed_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ValueError(f"{self.model_name} has no tokenizer: give token ids instead of text")
        return self.tokenizer


def shape_of(model: ResolvedModel) -> ModelShape:
    """What the cost counter must know of a model."""
    config = model.config
    return ModelShape(
        slug=model.name,
        name=model.name,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        tied_embeddings=config.tie_word_embeddings,
    )
