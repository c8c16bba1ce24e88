"""What a job of a decoder costs: parameters, bytes on a card, FLOPs. Pure functions, no torch; `plan.py` applies them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.core.config import Model, key
from posttrain.core.training import TrainingConfig, deepspeed_path

CHUNK = 4096  # rows of logits that core/logprobs.py holds in float32 at once
FORMULAS = """\
N parameters, D tokens, L layers, T tokens of a sequence, h width, q and k widths of all query and key heads, i width of
the MLP, V vocabulary, w bytes of a number, s sequences at once on a card, P cards. 1 GB = 10^9 bytes.
parameters, gradients, optimizer (bytes per parameter, AdamW)
  no DeepSpeed: 4, 4, 8; with bfloat16 autocast 2 more for its copy of the weights
  DeepSpeed and bfloat16: 2, 2, 12 (float32 master weights and two moments); float32: 4, 4, 12
  ZeRO 1 divides the optimizer by P, ZeRO 2 the gradients too, ZeRO 3 the parameters too; offload: 0 on the card
  jobs that do not train: w parameters
activations (one micro-batch of s sequences)
  block = s T (6h + 2q + 2k + 4i) w; all blocks: L block, or with gradient checkpointing L s T h w + block
  logits = 4 s T V w + 2 min(s T, 4096) 4 V: model output, response rows, both gradients; float32 rows of one chunk
  ZeRO 3: + 2 min(N, stage3_max_live_parameters) for parameters that are gathered
  jobs that do not train: logits of one micro-batch, 2 s T V w
  assumed: scoring of traces and validation hold the logits of one longest sequence at a time
  distillation: + s T V w for the logits of the teacher, whose w parameters lie whole on every card
KV cache = 2 L k w s T: rollouts or samples at once; GRPO: at least what its KL estimate, after training, needs beyond the
  trainer's states: result and start in float32 (8 N bytes) and the samples
engine = the share of the card that vLLM takes in the trainer's process
peak = parameters + gradients + optimizer + engine + max(activations, KV cache): a trainer generates and trains in turn
  not counted: CUDA context, communication buffers, fragmentation
FLOPs: training 6 N D, with gradient checkpointing 8 N D; forward or generation 2 N D
  distillation: one forward pass of the teacher beside the student's training, unless the arm has none
  attention adds 2 T q L per token forward, 3 times that for training, 4 times with gradient checkpointing
  GRPO: rollouts, one forward and backward; with vLLM one more forward (importance ratios), with beta > 0 one more
GPU-hours = FLOPs / (peak FLOP/s x utilisation) / 3600; queueing, loading and saving are not in it"""


class Architecture(Model):
    """What a decoder's public config.json says of its shape (Llama, Qwen2, Qwen3: SwiGLU, RMSNorm)."""

    hidden: int = key(help="hidden_size", gt=0)
    layers: int = key(help="num_hidden_layers", gt=0)
    heads: int = key(help="num_attention_heads", gt=0)
    kv_heads: int = key(help="num_key_value_heads", gt=0)
    intermediate: int = key(help="intermediate_size", gt=0)
    vocab: int = key(help="vocab_size", gt=0)
    head_dim: int | None = key(None, help="head_dim; null: hidden / heads", gt=0)
    tied: bool = key(True, help="tie_word_embeddings")
    bias: bool = key(False, help="bias on the query, key and value projections (Qwen2)")
    qk_norm: bool = key(False, help="RMSNorm on queries and keys (Qwen3)")

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of all query heads and of all key heads."""
        size = self.head_dim or self.hidden // self.heads
        return self.heads * size, self.kv_heads * size

    @property
    def parameters(self) -> int:
        """All parameters, a tied head counted once."""
        query, keys = self.widths
        attention = 2 * self.hidden * query + 2 * self.hidden * keys
        attention += (query + 2 * keys) * self.bias + 2 * (query // self.heads) * self.qk_norm
        block = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * block + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)


@dataclass(frozen=True)
class Memory:
    """Bytes on one card."""

    parameters: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0
    cache: float = 0
    engine: float = 0

    @property
    def peak(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.engine + max(self.activations, self.cache)


def training_flops(parameters: int, tokens: float, checkpointing: bool = False) -> float:
    """6 N D; 8 N D if the forward pass is done twice."""
    return (8 if checkpointing else 6) * parameters * tokens


def forward_flops(parameters: int, tokens: float) -> float:
    return 2 * parameters * tokens


def attention_flops(shape: Architecture, length: int, tokens: float) -> float:
    """Scores and values of causal attention in one forward pass: a token looks at half of the sequence on average."""
    return 2 * length * shape.widths[0] * shape.layers * tokens


def zero(name: str | None) -> tuple[int, bool, bool, float]:
    """(ZeRO stage, optimizer offloaded, parameters offloaded, live parameters) of configs/deepspeed/<name>.json."""
    if name is None:
        return 0, False, False, 0
    options = json.loads(Path(deepspeed_path(name)).read_text())["zero_optimization"]
    stage, live = options["stage"], options.get("stage3_max_live_parameters", 1e9)
    return stage, "offload_optimizer" in options, "offload_param" in options, live if stage == 3 else 0


def state_bytes(parameters: int, precision: str, deepspeed: str | None, cards: int) -> Memory:
    """Parameters, gradients and optimizer of AdamW on one of `cards` cards."""
    half = precision == "bfloat16"
    if deepspeed is None:
        return Memory((6 if half else 4) * parameters, 4 * parameters, 8 * parameters)
    stage, optimizer_away, parameters_away, _ = zero(deepspeed)
    width = 2 if half else 4
    share = [parameters / cards if stage >= at else parameters for at in (3, 2, 1)]
    away = 0 if optimizer_away else 1  # with the optimizer, gradients live in the host's memory too
    return Memory(0 if parameters_away else width * share[0], away * width * share[1], away * 12 * share[2])


def activation_bytes(shape: Architecture, tokens: int, width: int, stream: int, checkpointing: bool) -> float:
    """Blocks alone. width: bytes inside a block; stream: bytes of the residual stream between blocks."""
    query, keys = shape.widths
    block = tokens * (6 * shape.hidden + 2 * query + 2 * keys + 4 * shape.intermediate) * width
    return shape.layers * tokens * shape.hidden * stream + block if checkpointing else shape.layers * block


def logit_bytes(shape: Architecture, tokens: int, width: int) -> float:
    return 4 * tokens * shape.vocab * width + 2 * min(tokens, CHUNK) * shape.vocab * 4


def cache_bytes(shape: Architecture, sequences: int, length: int, width: int) -> float:
    return 2 * shape.layers * shape.widths[1] * width * sequences * length


def training_memory(shape: Architecture, job: TrainingConfig, cards: int, length: int, logits: int) -> Memory:
    """One micro-batch of rows of `length` tokens, logits kept for `logits` of them."""
    rows = max(1, job.batch_size // (cards * job.accumulation))
    half = job.precision == "bfloat16"
    width, stream = 2 if half else 4, 2 if half and job.deepspeed else 4  # autocast: float32 stream and float32 logits
    states = state_bytes(shape.parameters, job.precision, job.deepspeed, cards)
    working = activation_bytes(shape, rows * length, width, stream, job.gradient_checkpointing)
    working += logit_bytes(shape, rows * logits, stream) + 2 * min(shape.parameters, zero(job.deepspeed)[3])
    return replace(states, activations=working)
