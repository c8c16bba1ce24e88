"""What this code relies on in other packages, by introspection. A failure names what a new version changed."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest
import torch

from posttrain.core.codes import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")


def dict_keys(path: Path, function: str, variable: str) -> set[str]:
    """Keys of the literal that `function` in `path` assigns to `variable`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            for inner in ast.walk(node):
                target = getattr(inner, "target", None) or (getattr(inner, "targets", None) or [None])[0]
                if (
                    isinstance(inner, ast.Assign | ast.AnnAssign)
                    and getattr(target, "id", "") == variable
                    and isinstance(inner.value, ast.Dict)
                ):
                    return {key.value for key in inner.value.keys}
    raise AssertionError(f"{path.name} has no {variable} in {function}")


def defaults(owner: type) -> dict[str, object]:
    """Field -> default of a dataclass."""
    return {
        f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory() for f in dataclasses.fields(owner)
    }


def parameters(function) -> dict[str, object]:
    return {name: p.default for name, p in inspect.signature(function).parameters.items()}


# --- transformers ---------------------------------------------------------------------------------------------


def test_training_arguments_have_every_key_of_core_training():
    from transformers import TrainingArguments

    used = dict_keys(ROOT / "core" / "training.py", "arguments", "common")
    assert len(used) > 15 and used <= set(defaults(TrainingArguments))


def test_training_arguments_defaults():
    from transformers import TrainingArguments

    found = defaults(TrainingArguments)
    expected = {
        "average_tokens_across_devices": True,
        "lr_scheduler_type": "linear",
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "label_smoothing_factor": 0.0,
        "max_grad_norm": 1.0,
        "save_only_model": False,
        "dataloader_drop_last": False,
        "full_determinism": False,
        "bf16": False,
        "logging_nan_inf_filter": True,
        "ignore_data_skip": False,
        "label_names": None,
    }
    assert {name: found[name] for name in expected} == expected
    assert str(getattr(found["optim"], "value", found["optim"])).startswith("adamw_torch")


@pytest.mark.parametrize("name", ["constant_with_warmup", "cosine", "linear", "constant"])
def test_schedules_by_name(name):
    from transformers import SchedulerType

    assert SchedulerType(name)


def test_trainer_attributes_that_the_loss_relies_on():
    from transformers import Trainer

    assert Trainer.loss_is_scaled_for_ga is None
    step = inspect.getsource(Trainer.training_step)
    assert "if self.loss_is_scaled_for_ga is not None" in step and "loss / self.current_gradient_accumulation_steps" in step
    assert "self.model_accepts_loss_kwargs" in inspect.getsource(Trainer.__init__)
    assert {"model", "inputs", "return_outputs", "num_items_in_batch"} <= set(parameters(Trainer.compute_loss))
    assert list(parameters(Trainer.log)) == ["self", "logs", "start_time"]
    assert "resume_from_checkpoint" in parameters(Trainer.train)
    assert "processing_class" in parameters(Trainer.__init__) and "tokenizer" not in parameters(Trainer.__init__)


@pytest.mark.parametrize("shifts", [True, False])
def test_trainer_counts_labels_of_the_whole_accumulated_batch(shifts):
    """The number on which the losses' normaliser rests, from the Trainer's own counter."""
    from types import SimpleNamespace

    from transformers import Trainer

    assert "_get_num_items_in_batch(batch_samples" in inspect.getsource(Trainer.get_batch_samples)
    stand_in = SimpleNamespace(
        model_accepts_loss_kwargs=True,
        compute_loss_func=None,
        _loss_shifts_labels=shifts,
        args=SimpleNamespace(average_tokens_across_devices=True, n_gpu=1, world_size=1),
        get_tp_size=lambda: 1,
        get_cp_size=lambda: 1,
        get_sp_size=lambda: 1,
    )
    batches = [{"labels": torch.tensor([[-100, 1, 2], [-100, -100, 3]])}, {"labels": torch.tensor([[-100, 4, -100]])}]
    assert int(Trainer._get_num_items_in_batch(stand_in, batches, torch.device("cpu"))) == 4
    stand_in.model_accepts_loss_kwargs = False  # why sft.train sets it
    assert Trainer._get_num_items_in_batch(stand_in, batches, torch.device("cpu")) is None


def test_callback_hooks_and_states():
    from transformers import TrainerCallback, TrainerControl, TrainerState
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

    assert PREFIX_CHECKPOINT_DIR == "checkpoint"  # newest_complete and on_save spell it out
    for name in ("on_log", "on_step_end", "on_save"):
        assert list(parameters(getattr(TrainerCallback, name)))[:4] == ["self", "args", "state", "control"]
    assert {"global_step", "max_steps", "is_world_process_zero"} <= set(dir(TrainerState()))
    assert {"should_save", "should_training_stop"} <= set(defaults(TrainerControl))


def test_chat_templates_return_a_mapping_unless_asked_otherwise():
    from transformers import PreTrainedTokenizerBase

    found = parameters(PreTrainedTokenizerBase.apply_chat_template)
    assert found["return_dict"] is True and found["tokenize"] is True and found["add_generation_prompt"] is False


def test_model_loading_keywords():
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

    source = inspect.getsource(PreTrainedModel.from_pretrained)
    assert '"dtype"' in source and '"trust_remote_code"' in source and '"gguf_file"' in source
    assert "local_files_only" in parameters(PreTrainedModel.from_pretrained)
    fields = {
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "max_position_embeddings",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }
    config = LlamaConfig()
    assert all(hasattr(config, name) for name in fields) and config.attention_dropout == 0.0 and config.hidden_act == "silu"
    assert any(p.kind == p.VAR_KEYWORD for p in inspect.signature(LlamaForCausalLM.forward).parameters.values())
    assert "position_ids" in parameters(LlamaForCausalLM.forward) and "use_cache" in parameters(LlamaForCausalLM.forward)


def test_restarting_positions_mean_packing():
    from transformers.masking_utils import find_packed_sequence_indices

    found = find_packed_sequence_indices(torch.tensor([[0, 1, 0, 1, 2, 0, 0]]))
    assert found.tolist() == [[0, 0, 1, 1, 1, 2, 3]] and find_packed_sequence_indices(torch.tensor([[0, 1, 2]])) is None


def test_generate_adds_the_models_own_habits():
    """Why core.generation sets them aside; if this fails, it need not any more."""
    from transformers import GenerationConfig, GenerationMixin

    source = inspect.getsource(GenerationMixin._prepare_generation_config)
    assert "self.generation_config.to_dict()" in source
    assert all(
        value is None for value in (GenerationConfig().repetition_penalty, GenerationConfig().min_p, GenerationConfig().top_k)
    )
    common = GenerationConfig._get_default_generation_params()
    assert (common["repetition_penalty"], common["num_beams"], common["top_k"], common["temperature"]) == (1.0, 1, 50, 1.0)


def test_lazily_loaded_names_of_the_warm_server():
    import importlib

    from posttrain.core.warm import LAZY, PRELOAD

    for module, names in LAZY.items():
        assert module in PRELOAD and all(hasattr(importlib.import_module(module), name) for name in names)


# --- trl ------------------------------------------------------------------------------------------------------


def test_grpo_config_has_every_key_of_rl_grpo():
    from trl import GRPOConfig

    used = dict_keys(ROOT / "rl" / "grpo.py", "make_trainer", "options") | dict_keys(
        ROOT / "core" / "training.py", "arguments", "common"
    )
    assert len(used) > 25 and used <= set(defaults(GRPOConfig))


def test_grpo_defaults_that_the_recipe_does_not_set():
    from trl import GRPOConfig

    found = defaults(GRPOConfig)
    expected = {
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "top_k": 0,
        "top_p": 1.0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "num_iterations": 1,
        "epsilon": 0.2,
        "epsilon_high": None,
        "delta": None,
        "importance_sampling_level": "token",
        "mask_truncated_completions": False,
        "sync_ref_model": False,
        "reward_weights": None,
        "top_entropy_quantile": 1.0,
        "use_vllm": False,
        "vllm_mode": "colocate",
        "vllm_importance_sampling_correction": True,
        "steps_per_generation": None,
        "generation_batch_size": None,
        "disable_dropout": False,
        "shuffle_dataset": True,
        "use_bias_correction_kl": True,
        "generation_kwargs": None,
    }
    assert {name: found[name] for name in expected} == expected


def test_grpo_choices_that_configurations_offer():
    """Every value that our Literal allows is handled by name in the trainer's source."""
    import typing

    from trl import GRPOTrainer

    from posttrain.rl.grpo import Config

    source = inspect.getsource(inspect.getmodule(GRPOTrainer))
    for name in ("loss_type", "scale_rewards"):
        for value in typing.get_args(Config.model_fields[name].annotation):
            assert f'"{value}"' in source, (name, value)


def test_grpo_trainer_attributes_and_log_names():
    from trl import GRPOTrainer

    from posttrain.rl.grpo import CURVES

    assert GRPOTrainer.loss_is_scaled_for_ga is True
    assert {"model", "reward_funcs", "args", "train_dataset", "processing_class", "callbacks"} <= set(
        parameters(GRPOTrainer.__init__)
    )
    source = inspect.getsource(inspect.getmodule(GRPOTrainer))
    for name in CURVES:
        assert f'"{name}"' in source, name
    assert '"repetition_penalty": self.repetition_penalty' in source and "per_token_logps" in source


# --- datasets, snakemake, wandb, others -----------------------------------------------------------------------


def test_datasets():
    from datasets import Dataset, load_dataset

    assert {"path", "revision", "split", "streaming"} <= set(parameters(load_dataset))
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "x"}], "answer": "1"}])
    assert rows[0] == {"prompt": [{"role": "user", "content": "x"}], "answer": "1"}


def test_snakemake():
    import snakemake.api  # noqa: F401 - snakemake.workflow cannot be imported before it
    from snakemake.exceptions import WorkflowError
    from snakemake.settings.types import DAGSettings
    from snakemake.workflow import Workflow

    from posttrain.core.manifest import MAX_BYTES

    assert issubclass(WorkflowError, Exception)
    assert defaults(DAGSettings)["max_checksum_file_size"] == MAX_BYTES  # larger inputs are compared by time alone
    assert "self.global_resources" in inspect.getsource(Workflow) and isinstance(
        inspect.getattr_static(Workflow, "basedir"), property
    )


def test_snakemake_progress_lines_that_make_run_reads():
    import snakemake.api  # noqa: F401
    from snakemake import logging

    import posttrain.run as run

    source = inspect.getsource(logging)
    assert "{done} of {total} steps (" in source
    assert run.STEPS.match("3 of 17 steps (18%) done").groups() == ("3", "17")


def test_wandb():
    import wandb

    from posttrain.core import tracking

    tree = ast.parse(inspect.getsource(tracking.Tracker))
    used = {ast.unparse(n.func): {k.arg for k in n.keywords} for n in ast.walk(tree) if isinstance(n, ast.Call)}
    assert used["wandb.init"] <= set(parameters(wandb.init))
    assert len(used["wandb.Settings"]) >= 3 and used["wandb.Settings"] <= set(wandb.Settings.model_fields)


def test_scipy_and_safetensors():
    from safetensors import safe_open  # noqa: F401 - what save_pretrained writes
    from scipy.stats import BootstrapMethod, bootstrap  # noqa: F401

    assert {"vectorized", "method", "batch", "n_resamples", "confidence_level", "rng"} <= set(parameters(bootstrap)) | {"rng"}


def test_vision_and_audio_packages_stay_out():
    """A torchvision that does not fit breaks every TRL trainer with a misleading message."""
    import importlib.util

    for name in ("torchvision", "torchaudio"):
        assert importlib.util.find_spec(name) is None, f"{name} is installed; the locked environment leaves it out"
