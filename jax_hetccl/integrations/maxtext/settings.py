"""MaxText's arguments in a job of several clusters: those of one cluster only, those that must agree, those refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax_hetccl._errors import ConfigError

# The processes of a cluster are joined already; and an axis of one device must not vanish from types, since collectives over
# it would vanish as well, in the clusters of one device only.
_NEEDED = (("skip_jax_distributed_system", "true"), ("remove_size_one_mesh_axis_from_type", "false"))

_FOR_ONE = re.compile(r"([A-Za-z0-9_.-]+):([A-Za-z_][A-Za-z0-9_.]*=.*)", re.DOTALL)

# What decides on the update, or on how many programs run and in which order. The shapes of the model are compared when
# the parameters are broadcast; batch, mesh, kernels, rematerialisation and hardware are each cluster's own.
EQUAL = (
    *("steps", "learning_rate", "learning_rate_schedule_steps", "lr_schedule_type", "warmup_steps_fraction"),
    *("learning_rate_final_fraction", "wsd_decay_steps_fraction", "wsd_decay_style"),
    *("opt_type", "adam_b1", "adam_b2", "adam_eps", "adam_eps_root", "adam_weight_decay", "mu_dtype"),
    *("muon_type", "muon_beta", "muon_weight_decay", "muon_consistent_rms", "muon_include_routers"),
    *("trainable_parameters_mask", "gradient_clipping_threshold", "z_loss_multiplier", "grad_dtype", "weight_dtype"),
    *(
        "model_name",
        "base_emb_dim",
        "base_num_decoder_layers",
        "base_mlp_dim",
        "vocab_size",
        "num_experts",
        "scan_layers",
    ),
    *("load_balance_loss_weight", "mtp_loss_scaling_factor", "indexer_loss_scaling_factor", "indexer_sparse_training"),
    *("training_objective", "enable_dropout", "dropout_rate"),
    # The model's function, where it does not show in shapes.
    *("decoder_block", "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "mlp_activations"),
    *("attention_type", "sliding_window_size", "rope_type", "rope_max_timescale", "final_logits_soft_cap"),
    *("normalize_embedding_logits", "packing"),
    # With another order the parts of the data would not be disjoint.
    *("data_shuffle_seed", "enable_data_shuffling", "num_epoch", "expansion_factor_real_data"),
    *("max_target_length", "dataset_type", "eval_interval", "eval_steps", "eval_start_step", "target_eval_loss"),
    *("enable_checkpointing", "checkpoint_period", "save_checkpoint_on_start", "save_checkpoint_on_completion"),
    "warmup_programs_in_init",
)

# Settings that change parameters or the course of the program by what one cluster alone sees: (setting, allowed, why).
_ALONE = "it decides by what one cluster sees, so the clusters' parameters would drift apart"
_OTHER = "it trains with another loop or state than the one that is hooked"
REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("routed_bias_update_rate", (0,), "the bias follows one cluster's expert counts: " + _ALONE),
    ("use_qk_clip", (False,), "weights are clipped by one cluster's logits: " + _ALONE),
    ("skip_step_on_spikes", (False,), "the norms of two clusters may round differently, and one of them skip a step"),
    ("moe_dropless_fallback", (None, "", "None", "layer"), "a step is run again if one cluster's buffer overflows"),
    ("te_moe_block", (False,), "it stops training by what one cluster sees"),
    (
        "quantization",
        (None, ""),
        "the scales of some kinds are updated from one cluster's values, and none was verified",
    ),
    ("use_tunix_gradient_accumulation", (False,), "it weights micro-batches equally, not by tokens"),
    ("enable_diloco", (False,), _OTHER),
    ("elastic_enabled", (False,), _OTHER),
    ("enable_rampup_batch_size", (False,), "its progress is restored from a checkpoint that only one cluster has"),
    ("enable_emergency_checkpoint", (False,), "every slice restores for itself"),
    ("enable_multi_tier_checkpointing", (False,), "every slice restores for itself"),
    ("enable_autocheckpoint", (False,), "it saves when one cluster is preempted"),
    ("enable_single_controller", (False,), "each cluster is a JAX world of several controllers"),
    *((key, (value == "true",), "linked clusters need the other value") for key, value in _NEEDED),
    ("compiled_trainstep_file", ("",), "a program compiled elsewhere has no exchanges with the other clusters"),
)


def arguments(argv: Sequence[str], cluster: str, clusters: Sequence[str]) -> list[str]:
    """The arguments of one cluster: those for all, and ``NAME:key=value`` where it is ``NAME``.

    Args:
      argv: what the command line gives.
      cluster: this cluster's name.
      clusters: all names.

    Returns:
      MaxText's arguments, with those that linked clusters need.

    Raises:
      ConfigError: ``NAME`` is no cluster.
    """
    common: list[str] = []
    own: dict[str, str] = {}
    for argument in argv:
        match = _FOR_ONE.fullmatch(argument)
        if match is None:
            common.append(argument)
        elif match[1] not in clusters:
            raise ConfigError(
                f"{argument}: there is no cluster {match[1]!r}; NAME:key=value is for one of {', '.join(clusters)}"
            )
        elif match[1] == cluster:
            own[match[2].split("=")[0]] = match[2]
    # What is said for one cluster counts there, wherever it stands.
    found = [*(a for a in common if a.split("=")[0] not in own), *own.values()]
    given = {a.split("=")[0] for a in found}
    return found + [f"{key}={value}" for key, value in _NEEDED if key not in given]


def refusals(settings: Mapping[str, Any]) -> list[str]:
    """Why a run with these settings cannot span clusters; empty if it can.

    Args:
      settings: MaxText's, by name; one that a version does not have counts as unset.
    """
    found = [
        f"{key}={settings[key]!r}: {why}"
        for key, allowed, why in REFUSED
        if key in settings and settings[key] not in allowed
    ]
    if settings.get("dataset_type") in ("grain", "olmo_grain") and settings.get("enable_checkpointing"):
        found.append(
            f"dataset_type={settings['dataset_type']!r} with enable_checkpointing: the checkpoint holds the iterators "
            "of one cluster only, so the others would start their data anew. Use enable_checkpointing=false or another dataset_type"
        )
    if settings.get("eval_interval", -1) > 0 and settings.get("eval_steps", -1) <= 0:
        found.append(
            f"eval_steps={settings['eval_steps']} with eval_interval: clusters may have unequal numbers of batches; give a number that every cluster has"
        )
    if (settings.get("lora") or {}).get("enable_lora"):
        found.append("lora.enable_lora=True: only the parameters of a whole model are synchronised")
    return found


def difference(said: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The first settings in which clusters differ that must not, as an error; None if there are none.

    Args:
      said: by cluster, the values of ``EQUAL``.
    """
    for key in EQUAL:
        values = {name: values.get(key) for name, values in said.items()}
        if len({str(v) for v in values.values()}) > 1:
            return f"{key} differs: " + ", ".join(f"{value} in {name}" for name, value in values.items())
    return None
