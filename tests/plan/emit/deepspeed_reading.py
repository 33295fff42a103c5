"""A configuration of DeepSpeed as DeepSpeed itself reads it, without ranks: the counts that it asks for are stand-ins.

Invariant: what stands in answers as on `ranks` ranks that are laid out by the file (and, in a pipeline, by the script),
so a batch that does not fit them is refused here as it would be there.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any
from unittest import mock

from shardway.plan.case import Case


def load_with_deepspeed(said: Mapping[str, Any], case: Case, ranks: int) -> Any:
    """The configuration as deepspeed.initialize makes it. Raises what DeepSpeed raises, its checks of AutoEP included.

    A mesh is made where both of its sizes are in the file; a pipeline brings its own count of data ranks.
    """
    runtime = importlib.import_module("deepspeed.runtime.config")
    experts = importlib.import_module("deepspeed.module_inject.auto_ep_config")
    degrees = case.degrees
    data = ranks // (degrees.pp * degrees.tp * degrees.cp)
    grid = mock.Mock(get_data_parallel_world_size=lambda: data) if degrees.pp > 1 else None
    mesh = mock.Mock(get_group=lambda mesh_dim: mesh_dim) if "sequence_parallel_size" in said else None
    with (
        mock.patch.object(runtime.dist, "get_rank", return_value=0),
        mock.patch.object(runtime.dist, "get_world_size", lambda group=None: said[f"{group}_size"] if group else ranks),
    ):
        config = runtime.DeepSpeedConfig(dict(said), mpu=grid, mesh_device=mesh)
    zero = config.zero_config
    experts.validate_autoep_config(
        config.expert_parallel_config,
        ranks,
        degrees.pp,
        degrees.tp,
        degrees.cp,
        zero_stage=int(zero.stage),
        zero_offload_optimizer=zero.offload_optimizer is not None,
        zero_offload_param=zero.offload_param is not None,
    )
    return config
