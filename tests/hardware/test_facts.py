"""Machines and accelerators as text."""

from __future__ import annotations

from shardway.hardware.probe import Device, LocalMachine, ReportFact, render_machine

GIB = 2**30


def test_a_machine_with_accelerators() -> None:
    machine = LocalMachine(
        hostname="node7",
        cpu_model="EPYC 7763",
        physical_cores=64,
        usable_cores=32,
        memory_bytes=256 * GIB,
        accelerators=(*[Device("NVIDIA A100-SXM4-40GB", 40 * GIB)] * 4, Device("NVIDIA A40", None)),
        python="3.12.1",
        os="Linux 6.1 x86_64",
    )
    assert render_machine(machine) == (
        ReportFact("host", "node7"),
        ReportFact("accelerators", "4 x NVIDIA A100-SXM4-40GB (40.0 GiB), 1 x NVIDIA A40 (n/a)"),
        ReportFact("cpu", "EPYC 7763"),
        ReportFact("cores", "32 usable, 64 physical"),
        ReportFact("memory", "256.0 GiB"),
        ReportFact("os", "Linux 6.1 x86_64"),
        ReportFact("python", "3.12.1"),
    )


def test_what_a_machine_does_not_tell_is_not_available() -> None:
    machine = LocalMachine("h", None, None, 1, None, (), "3.11.0", "Darwin 24 arm64")
    facts = {fact.label: fact.value for fact in render_machine(machine)}
    assert facts["accelerators"] == "none"
    assert facts["cpu"] == "n/a"
    assert facts["cores"] == "1 usable, n/a physical"
    assert facts["memory"] == "n/a"
