from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from image_cases import RECIPE, Fakes

from golden_files import Golden
from shardway.errors import UserError
from shardway.launch.image.request import REQUIREMENTS, Recipe, parse_recipe, render_recipe, split_pip_line


def run_recipe(fakes: Fakes, recipe: Recipe) -> list[list[str]]:
    """What `sh` calls, with the requirements as they are when they are installed."""
    kept = fakes.folder / "requirements.txt"
    script = render_recipe(recipe).replace(REQUIREMENTS, str(kept)).replace(f"rm {kept}", "")
    path = f"{fakes.folder / 'inside'}:{os.environ['PATH']}"
    (fakes.folder / "installed").unlink(missing_ok=True)
    subprocess.run(
        ["sh"], input=script, env={**os.environ, "PATH": path, "FAKES": str(fakes.folder)}, text=True, check=True
    )
    return fakes.installed


def test_packages_are_installed_in_order(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path / "fakes")
    requirements = str(fakes.folder / "requirements.txt")
    pip = ["python3", "-m", "pip", "install", "--no-cache-dir"]
    apt = ["apt-get", "-o", "APT::Sandbox::User=root"]
    assert run_recipe(fakes, RECIPE) == [
        [*apt, "update"],
        [*apt, "install", "--yes", "--no-install-recommends", "--", "libaio-dev", "git=1:2.39.5-0+deb12u2"],
        [*pip, "--requirement", requirements],
        [*pip, "deepspeed==0.16.4"],
        [*pip, "torch >= 2.7, <3"],
        [*pip, "flash-attn", "--no-build-isolation"],
    ]
    assert Path(requirements).read_text().splitlines() == [
        "numpy>=1.26 # for the data",
        "uvloop ; python_version < '3.13'",
    ]


_lines = st.text(st.sampled_from("ab1 =<>;'\"$(){}`\\&|*?#~!,[]é%-"), min_size=1, max_size=16)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(_lines, min_size=1, max_size=8))
def test_any_line_arrives_unchanged(tmp_path: Path, lines: list[str]) -> None:
    """Of a requirements file, line by line; of --pip, its words."""
    allowed = []
    for line in lines:
        try:
            allowed.append((line, parse_recipe([], [line], line).requirements))
        except UserError:
            continue
    assume(allowed)
    folder = tmp_path / os.urandom(4).hex()
    pip, requirements = [line for line, _ in allowed], "\n".join(line for line, _ in allowed)
    calls = run_recipe(Fakes(folder), parse_recipe([], pip, requirements))
    wanted = [line for line in pip if line.strip() and not line.lstrip().startswith("#")]
    kept = folder / "requirements.txt"
    assert (kept.read_text().splitlines() if wanted else []) == wanted
    assert [call[5:] for call in calls if "--requirement" not in call] == [list(split_pip_line(line)) for line in pip]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("deepspeed==0.16.4", ["deepspeed==0.16.4"]),
        ("torch >= 2.7", ["torch >= 2.7"]),
        ("a; python_version < '3.13'", ["a; python_version < '3.13'"]),
        ("a @ https://x.org/a.whl", ["a @ https://x.org/a.whl"]),
        ("numpy scipy", ["numpy", "scipy"]),
        ("flash-attn --no-build-isolation", ["flash-attn", "--no-build-isolation"]),
        ("--index-url https://x.org/simple 'torch>=2'", ["--index-url", "https://x.org/simple", "torch>=2"]),
        ("-c /etc/pip/constraint.txt vllm", ["-c", "/etc/pip/constraint.txt", "vllm"]),
    ],
)
def test_words_of_a_pip_line(line: str, words: list[str]) -> None:
    assert list(split_pip_line(line)) == words
    assert parse_recipe([], [line]).pip == (line,)


def test_all_that_cannot_be_installed_is_told_at_once(golden: Golden) -> None:
    pip = ["'numpy", "-e .", "git+https://t0ken@github.com/a/b", "{{ x }}", "a\nb", " "]
    requirements = "./wheels/a.whl\n-r more.txt\nnumpy \\\n--extra-index-url https://u:s3cret@x.org/simple\nok==1\n"
    with pytest.raises(UserError) as error:
        parse_recipe(["lib aio", "--yes"], pip, requirements)
    said = str(error.value)
    assert "t0ken" not in said
    assert "s3cret" not in said
    golden(f"{said}\n", "images/refused-packages.txt")


@pytest.mark.parametrize("requirements", ["", "\n# nothing\n"])
def test_a_recipe_of_comments_adds_nothing(requirements: str) -> None:
    assert parse_recipe([], [], requirements).is_empty
