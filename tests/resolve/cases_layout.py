"""Rules of the degrees, of how a batch is cut over them, and of the process."""

from __future__ import annotations

from rule_cases import GPU, Derives, Refuses

DERIVATIONS: list[Derives] = [
    Derives("degrees_multiply_to_the_ranks", (), "parallel.dp_replicate", 4, "4 ranks", {"ranks": 4}),
    Derives(
        "degrees_multiply_to_the_ranks",
        ("parallel.dp_shard=2",),
        "parallel.dp_replicate",
        3,
        "6 ranks / dp_shard 2",
        {"ranks": 6},
    ),
    Derives(
        "degrees_multiply_to_the_ranks",
        ("parallel.dp_shard=auto", "parallel.dp_replicate=2"),
        "parallel.dp_shard",
        3,
        "6 ranks / dp_replicate 2",
        {"ranks": 6},
    ),
    Derives(
        "degrees_multiply_to_the_ranks",
        ("parallel.dp_shard=auto",),
        "parallel.dp_shard",
        6,
        "6 ranks",
        {"ranks": 6},
    ),
    Derives(
        "degrees_multiply_to_the_ranks",
        ("parallel.dp_shard=auto",),
        "parallel.dp_replicate",
        1,
        "dp_shard is auto and takes all ranks",
        {"ranks": 6},
    ),
    Derives(
        "a_micro_batch_is_a_part_of_a_rank_share",
        ("train.global_batch=12",),
        "train.micro_batch",
        3,
        "12 samples / 4 data-parallel ranks",
        {"ranks": 4},
    ),
    Derives(
        "a_micro_batch_is_a_part_of_a_rank_share",
        ("train.global_batch=13",),
        "train.micro_batch",
        4,
        "13 samples / 4 data-parallel ranks",
        {"ranks": 4},
    ),
    Derives("a_run_uses_the_accelerator_where_there_is_one", (), "run.device", "cpu", "no accelerator found"),
    Derives("a_run_uses_the_accelerator_where_there_is_one", (), "run.device", "cuda", "2 accelerators found", GPU),
    Derives("a_run_without_a_name_is_called_after_its_file", (), "run.name", "default", "name of the run file"),
    Derives(
        "ranks_of_a_node_share_its_cores",
        (),
        "run.threads",
        4,
        "16 cores / 4 ranks on a node",
        {"ranks": 8, "ranks_per_node": 4, "usable_cores": 16},
    ),
    Derives(
        "ranks_of_a_node_share_its_cores",
        (),
        "run.threads",
        1,
        "2 cores / 4 ranks on a node",
        {"ranks": 4, "usable_cores": 2},
    ),
]

REFUSALS: list[Refuses] = [
    Refuses(
        "degrees_multiply_to_the_ranks",
        ("parallel.dp_shard=3",),
        "  parallel.dp_shard (command line): dp_shard 3 does not divide the number of ranks, 4\n"
        "      allowed: degrees whose product is the number of ranks, such as 2 for this one\n"
        '      to do: start 3 ranks (--nproc 3), or change it; "auto" takes what the others leave',
        {"ranks": 4},
    ),
    Refuses(
        "degrees_multiply_to_the_ranks",
        ("parallel.dp_shard=3", "parallel.dp_replicate=2"),
        "  parallel.dp_shard (command line): dp_replicate 2 x dp_shard 3 = 6 is not the number of ranks, 4\n"
        "      allowed: degrees whose product is the number of ranks, such as 2 for this one\n"
        '      to do: start 6 ranks (--nproc 6), or change a degree; "auto" takes what the others leave',
        {"ranks": 4},
    ),
    Refuses(
        "degrees_multiply_to_the_ranks",
        ("parallel.dp_replicate=1",),
        "  parallel.dp_replicate (command line): every degree is 1, and there are 4 ranks\n"
        "      allowed: degrees whose product is the number of ranks, such as 4 for this one\n"
        '      to do: start 1 rank (--nproc 1), or change it; "auto" takes what the others leave',
        {"ranks": 4},
    ),
    Refuses(
        "every_replica_gets_a_sample",
        ("train.global_batch=3",),
        "  train.global_batch (command line): 3 samples cannot be shared by 4 data-parallel ranks\n"
        "      allowed: at least 4\n"
        "      to do: raise train.global_batch or use fewer ranks",
        {"ranks": 4},
    ),
    Refuses(
        "every_replica_gets_a_sample",
        ("train.global_batch=[[0, 2], [9, 8]]",),
        "  train.global_batch (command line): 2 samples cannot be shared by 4 data-parallel ranks\n"
        "      allowed: at least 4\n"
        "      to do: raise train.global_batch or use fewer ranks",
        {"ranks": 4},
    ),
    Refuses(
        "a_micro_batch_is_a_part_of_a_rank_share",
        ("train.global_batch=16", "train.micro_batch=5"),
        "  train.micro_batch (command line): 5 is more than a rank's share of 4 (train.global_batch 16 / 4 ranks)\n"
        "      allowed: 1 to 4",
        {"ranks": 4},
    ),
    Refuses(
        "a_micro_batch_is_a_part_of_a_rank_share",
        ("train.global_batch=[[0, 4], [9, 16]]", "train.micro_batch=5"),
        "  train.micro_batch (command line): 5 is more than a rank's share of 4 (train.global_batch 16 / 4 ranks)\n"
        "      allowed: 1 to 4",
        {"ranks": 4},
    ),
    Refuses(
        "a_run_uses_the_accelerator_where_there_is_one",
        ("run.device=cuda",),
        '  run.device (command line): "cuda" is asked for and this machine shows no accelerator\n'
        '      allowed: "auto" or "cpu"',
    ),
    Refuses(
        "timeouts_are_nested",
        ("run.collective_timeout=10min", "run.stop_timeout=20min"),
        "  run.collective_timeout (command line): 10m is not shorter than run.start_timeout = 10m, so a hanging "
        "collective would be ended before it can say which operation hangs\n"
        "      allowed: less than 10m\n"
        "      to do: lower run.collective_timeout or raise run.start_timeout",
    ),
    Refuses(
        "timeouts_are_nested",
        ("run.stop_timeout=1s",),
        "  run.collective_timeout (default): 5m is not shorter than run.stop_timeout = 1s, so a hanging "
        "collective would be ended before it can say which operation hangs\n"
        "      allowed: less than 1s\n"
        "      to do: lower run.collective_timeout or raise run.stop_timeout",
    ),
    Refuses(
        "a_job_has_as_many_nodes_as_the_run_may",
        ("run.elastic=[2, 4]",),
        "  run.elastic (command line): [2, 4] leaves out site.nodes = 1\n"
        "      allowed: a range with 1 in it\n"
        "      to do: set site.nodes to 2 to 4, or widen run.elastic",
    ),
]
