from __future__ import annotations

import json

import pytest
from submitting import Person, Submitted, disturbed

LAUNCHERS = ("torchrun", "srun", "mpirun")
WORDS = ("--lr", "3e-4", "a b", "it's", '"$(id)"', "*", "", "--tags={x,y}", "line\nline")

VALUE = "a $b 'c' \"d\", e"

SCRIPT = """\
import json, os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
model(torch.ones(2, 4)).sum().backward()
gradients = [None] * dist.get_world_size()
dist.all_gather_object(gradients, [p.grad.tolist() for p in model.parameters()])
if dist.get_rank() == 0:
    told = {"words": sys.argv[1:], "equal": gradients[0] == gradients[1], "local": os.environ["LOCAL_RANK"]}
    told["value"] = os.environ["VALUE"]
    with open("told.json", "w") as file:
        json.dump(told, file)
dist.destroy_process_group()
os._exit(0)  # gloo's threads may still hold tensors: an interpreter that ends meanwhile aborts (pytorch #190489)
"""


@pytest.fixture(scope="module")
def trained(busy_alice: Person) -> dict[str, Submitted]:
    """One training with each launcher: two nodes, four ranks."""
    return {
        launcher: busy_alice.train(launcher, f"site.launcher={launcher}", "site.ranks_per_node=2")
        for launcher in LAUNCHERS
    }


@pytest.fixture(scope="module")
def commands(busy_alice: Person, trained: dict[str, Submitted]) -> dict[str, Submitted]:
    """A script of plain PyTorch with each launcher, on two nodes."""
    busy_alice.write("plain.py", SCRIPT)
    variables = f"site.environment={{VALUE = {json.dumps(VALUE)}}}"
    words = ("--on", "generic-slurm", "--nodes", "2", "--walltime", "5m", variables)
    return {
        launcher: busy_alice.submit(
            *words, f"run.name=plain {launcher}", f"site.launcher={launcher}", "--", "python", "plain.py", *WORDS
        )
        for launcher in LAUNCHERS
    }


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_four_ranks_on_two_nodes_train(
    trained: dict[str, Submitted], commands: dict[str, Submitted], launcher: str
) -> None:
    run = trained[launcher]
    result = run.ended()
    assert (result.state, result.step, result.by) == ("finished", 20, "rank 0"), run.printed()
    started = run.directory.attempt(1).read_started()
    assert started is not None
    assert len(started.nodes.split()) == 2
    event = next(event for event in run.directory.events(0) if event["event"] == "started")
    assert (event["world"], event["launcher"]) == (4, launcher)


def test_losses_are_the_same_to_the_bit_whoever_starts_the_ranks(trained: dict[str, Submitted]) -> None:
    losses = [trained[launcher].losses() for launcher in LAUNCHERS]
    assert len(losses[0]) == 20
    assert losses[0] == losses[1] == losses[2]


def test_output_of_one_rank_is_found(busy_alice: Person, trained: dict[str, Submitted]) -> None:
    """Whoever starts the ranks marks their lines; those of rank 0 say how it went."""
    for run in trained.values():
        assert "step 20/20" in busy_alice.told("logs", run.path, "--job", "--rank", "0")
        assert "step 20/20" not in busy_alice.told("logs", run.path, "--job", "--rank", "3")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_plain_script_of_pytorch_runs_unedited(commands: dict[str, Submitted], launcher: str) -> None:
    """It meets by torch's own variables; its words and variables arrive as they were typed."""
    run = commands[launcher]
    result = run.ended()
    assert (result.state, result.exit_code, result.by) == ("finished", 0, "job script"), run.printed()
    folder = run.directory.work
    told = json.loads((folder / "told.json").read_text())
    assert told == {"words": list(WORDS), "equal": True, "local": "0", "value": VALUE}


def test_a_profile_of_ones_own_brings_account_and_modules(alice: Person) -> None:
    modules = ("[modules]", 'load = ["Toolchain/2025"]')
    alice.add_site("mine", *modules, "[defaults]", 'account = "chemistry"')
    run = alice.train("modules", "--on", "mine", "site.nodes=1", disturbed(MARKS="yes"))
    assert run.ended().state == "finished", run.printed()
    assert [mark[1:] for mark in run.marks()] == [["host", "2025"]]
    assert alice.cluster.accounted(run.job(), "Account")["Account"] == "chemistry"
