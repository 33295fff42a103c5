"""Multiple choice: the numbers of lm-evaluation-harness, and mistakes in a file of questions, each with its line."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from choice_cases import QUESTIONS, save_formula_model, write_questions

from pool import ranks
from runs import pool_ranks
from shardway.data.tokenizers import ByteTokenizer
from shardway.errors import UserError
from shardway.infer.choices import encode_answer, judge_choices, score_choices
from shardway.infer.inputs import Question, read_questions
from shardway.infer.lm_eval import _read_results, run_tasks
from shardway.infer.model import ModelRequest, OpenedModel, open_model
from shardway.infer.tokenizer import open_data_tokenizer

HARNESS = (
    *((-31.34587860107422, -95.91612243652344, -19.143442153930664),),
    *((-32.458831787109375, -33.82371139526367, -128.2919921875),),
    *((-82.80409240722656, -104.66600036621094, -24.61855697631836),),
    *((-39.9220085144043, -35.1972770690918, -31.673023223876953),),
    *((-18.881025314331055, -21.37511444091797, -59.52019500732422, -21.236595153808594),),
    *((-29.99932861328125, -31.201892852783203),),
    *((-106.88768005371094, -39.46928405761719),),
    *((-51.55813980102539, -18.96227264404297, -11.34269905090332),),
)
"""What lm_eval 0.4.13 gave for the answers of QUESTIONS: simple_evaluate with HFLM(pretrained=FOLDER, dtype="float32",
device="cpu", batch_size=3) on the folder of `save_formula_model` with `as_library()` of the byte tokenizer saved in it,
and a task of output_type multiple_choice with doc_to_text "{{question}}" on `write_questions`; 2026-11-28."""

ACCURACIES = {"acc": 0.25, "acc_norm": 0.125, "acc_bytes": 0.375}
STDERRS = {"acc": 0.16366341767699427, "acc_norm": 0.125, "acc_bytes": 0.18298126367784995}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenedModel:
    folder = save_formula_model(tmp_path_factory.mktemp("model") / "formula")
    return open_model(ModelRequest(str(folder), device="cpu", tokenizer="bytes"))


def flat(likelihoods: object) -> list[float]:
    return [value for found in likelihoods for value in found]  # type: ignore[attr-defined]


def test_numbers_are_those_of_the_harness(opened: OpenedModel, tmp_path: Path) -> None:
    questions = read_questions(write_questions(tmp_path / "questions.jsonl"))
    for rows in (3, None):
        scores = score_choices(opened, questions, rows=rows)
        assert flat(scores.likelihoods) == pytest.approx(flat(HARNESS), rel=1e-6)
        assert scores.results == ACCURACIES
        assert scores.errors == pytest.approx(STDERRS, rel=1e-12)


@ranks(2)
def test_answers_are_shared_over_ranks(rank: int, tmp_path: Path) -> None:
    on = pool_ranks()
    on.ask_first(lambda: str(save_formula_model(tmp_path / "formula")))
    opened = open_model(ModelRequest(str(tmp_path / "formula"), device="cpu", tokenizer="bytes"))
    questions = [
        Question(at, each.get("question", each.get("prompt")), tuple(each["choices"]), each["answer"])
        for at, each in enumerate(QUESTIONS, 1)
    ]
    both, alone = score_choices(opened, questions, on, rows=4), score_choices(opened, questions, rows=4)
    assert both.likelihoods == alone.likelihoods
    assert both.results == ACCURACIES


def test_accuracies_and_errors_by_hand() -> None:
    """Two questions: by likelihood both are right; by character none; by byte the second, whose answers are of two-byte
    letters or of one."""
    questions = [Question(1, "q", ("aaaa", "b"), 1), Question(2, "q", ("éé", "bbb"), 0)]
    results, errors = judge_choices(questions, [(-4.0, -2.0), (-3.0, -3.3)])
    assert results == {"acc": 1.0, "acc_norm": 0.0, "acc_bytes": 0.5}
    assert errors == {"acc": 0.0, "acc_norm": 0.0, "acc_bytes": 0.5}
    assert judge_choices(questions[:1], [(-4.0, -2.0)])[1] == {}


def test_spaces_at_the_end_of_a_question_belong_to_the_answer() -> None:
    tokens, count = encode_answer(open_data_tokenizer("bytes", ""), "A cat: \n", "meow")
    assert (bytes(tokens), count) == (b"A cat: \n meow", len(" \n meow"))


def test_the_byte_tokenizer_as_the_librarys_own_has_the_same_tokens() -> None:
    library, own = open_data_tokenizer("bytes", "").as_library(), ByteTokenizer()
    text = "Āhé €\n\x00x"
    assert library(text)["input_ids"] == list(own.encode([text])[0])
    assert library.decode(library(text)["input_ids"]) == text
    assert (library.eos_token_id, library.pad_token_id) == (0, 0)


def write_lines(path: Path, *entries: object) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in entries))
    return path


def test_all_wrong_lines_are_named(tmp_path: Path) -> None:
    good = {"question": "q", "choices": ["a", "b"], "answer": 0}
    path = write_lines(
        tmp_path / "wrong.jsonl",
        good,
        {**good, "answer": 2},
        "",
        "{",
        {**good, "choices": []},
        {**good, "question": " "},
        {**good, "answer": "a"},
        [1],
    )
    with pytest.raises(UserError) as refused:
        read_questions(path)
    message = str(refused.value)
    for words in (
        '  line 2: has "answer" 2, and 2 choices: 0 to 1\n',
        "  line 4: is no JSON",
        '  line 5: has no list of texts under "choices"',
        '  line 6: has no text under "question" or "prompt"',
        '  line 7: has "answer" "a", and 2 choices',
        "  line 8: is no JSON object",
    ):
        assert words in message
    assert message.startswith("6 problems in ")


def test_files_without_questions_are_refused(opened: OpenedModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is empty"):
        read_questions(write_lines(tmp_path / "empty.jsonl", ""))
    with pytest.raises(UserError, match="No such file"):
        read_questions(tmp_path / "missing.jsonl")
    long = {"question": "x" * 70, "choices": ["a", "b"], "answer": 0}
    path = write_lines(tmp_path / "long.jsonl", {**long, "question": "x"}, long)
    with pytest.raises(UserError, match=r"line 2: has 72 tokens with its longest choice\n.*the 64 positions"):
        score_choices(opened, read_questions(path))
    opened_without = OpenedModel(opened.model, None, "m", "m", opened.device, opened.dtype)
    with pytest.raises(UserError, match="has no tokenizer"):
        score_choices(opened_without, read_questions(write_lines(tmp_path / "a.jsonl", {**long, "question": "x"})))


# --- the harness itself


def test_without_the_harness_a_sentence_says_how_to_get_it(opened: OpenedModel) -> None:
    if importlib.util.find_spec("lm_eval") is not None:
        pytest.skip("lm_eval is installed here")
    with pytest.raises(UserError, match=r"not installed here .*\n  To do: pip install \"lm_eval\[hf\]\""):
        run_tasks(opened, ["hellaswag"])


def test_results_of_the_harness_are_read() -> None:
    """As lm_eval 0.4.13 gave them for the task "mine" on QUESTIONS, and a metric with a filter of another name."""
    found = {
        "mine": {
            "name": "mine",
            "alias": "mine",
            "sample_len": 8,
            "acc,none": 0.25,
            "acc_stderr,none": 0.16366341767699427,
            "exact_match,strict-match": 0.5,
            "exact_match_stderr,strict-match": "N/A",
        }
    }
    assert _read_results(found) == (
        {"mine/acc": 0.25, "mine/exact_match,strict-match": 0.5},
        {"mine/acc": 0.16366341767699427},
    )


def test_a_task_of_ones_own_runs_on_the_opened_model(
    opened: OpenedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_XET_HIGH_PERFORMANCE", "KMP_DUPLICATE_LIB_OK", "PIP_DISABLE_PIP_VERSION_CHECK"):
        monkeypatch.setenv(name, "1")  # its libraries set them
    pytest.importorskip("lm_eval.models.huggingface", reason="lm-evaluation-harness is not installed")
    questions = write_questions(tmp_path / "questions.jsonl")
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "answer",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": name} for name in ACCURACIES],
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(task))  # JSON is YAML
    scores = run_tasks(opened, ["mine"], folder=tmp_path)
    assert scores.results == {f"mine/{name}": value for name, value in ACCURACIES.items()}
    assert scores.errors == pytest.approx({f"mine/{name}": value for name, value in STDERRS.items()})
    with pytest.raises(UserError, match="--task: nope: no such task"):
        run_tasks(opened, ["nope"], folder=tmp_path)
