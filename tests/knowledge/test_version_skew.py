"""For a name that an installed release lacks, the answer is the releases that have it, and nothing else."""

from __future__ import annotations

import lzma
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counting import lines_run
from gpuwarden.interfaces.results.diagnosing import diagnose_log
from gpuwarden.interfaces.results.references import look_up
from gpuwarden.interfaces.results.version_skew import SkewReply, sentence_of
from gpuwarden.knowledge.failure import read_failure
from gpuwarden.knowledge.version_skew import Change, Skew, explain
from gpuwarden.static_analysis.signatures.history import argument_history
from gpuwarden.static_analysis.signatures.members import members
from gpuwarden.static_analysis.signatures.tables import packages, table
from paths import CORPUS, ROOT

SKEW = CORPUS / "skew"
TOOLS = ROOT / "tools"
RENAMED = "TypeError: TrainingArguments.__init__() got an unexpected keyword argument 'evaluation_strategy'"
DORA = "TypeError: LoraConfig.__init__() got an unexpected keyword argument 'use_dora'"


@pytest.fixture
def scoring(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    import score_skew

    return score_skew


def skew(*lines: str) -> Skew:
    found = explain(read_failure("\n".join(lines)))
    assert found is not None
    return found


@pytest.mark.slow
def test_every_seen_report_is_answered_correctly(scoring: Any) -> None:
    rows = list(scoring.cases(scoring.read(SKEW / "open.jsonl")))
    assert [case.row["address"] for case in rows if not case.right] == []


def test_unseen_reports_are_answered_as_often_as_in_the_first_run(scoring: Any) -> None:
    rows = list(scoring.cases(scoring.read(SKEW / "unseen.jsonl")))
    assert sum(case.right for case in rows if case.explained) >= 24
    assert all(case.right for case in rows if not case.explained)


def test_a_renamed_argument_gets_its_new_name_and_a_working_release() -> None:
    found = skew(RENAMED)
    assert (found.package, found.change, found.certainty) == ("transformers", Change.REMOVED, "likely")
    assert (found.renamed_to, found.until, found.gone_in) == ("eval_strategy", "4.50.3", "4.51.3")
    assert found.pin == "transformers<=4.50.3"


def test_the_installed_release_decides_between_too_old_and_too_new() -> None:
    assert skew("peft 0.8.2", DORA).change is Change.ADDED
    assert skew("peft 0.8.2", DORA).pin == "peft>=0.9"
    named = skew(
        "transformers==4.33.1", "ImportError: cannot import name 'is_nltk_available' from 'transformers.utils'"
    )
    assert (named.change, named.installed) == (Change.ADDED, "4.33.1")


def test_a_name_in_the_installed_release_is_only_possible() -> None:
    found = skew("transformers 4.40.0", RENAMED)
    assert (found.change, found.certainty) == (Change.PRESENT, "possible")


def test_the_class_is_read_from_source_if_the_message_omits_it() -> None:
    frame = '  File "/venv/lib/python3.9/site-packages/transformers/trainer.py", line 4127, in create'
    trace = f"Traceback (most recent call last):\n{frame}\n    self.accelerator = Accelerator("
    found = skew(trace, "TypeError: __init__() got an unexpected keyword argument 'dispatch_batches'")
    assert (found.package, found.name) == ("accelerate", "accelerate.Accelerator.dispatch_batches")


def test_a_member_removed_from_a_base_class_is_found_via_a_subclass() -> None:
    found = skew("transformers 5.2.0", "AttributeError: BertTokenizer has no attribute batch_encode_plus")
    assert (found.change, found.gone_in, found.certainty) == (Change.REMOVED, "5.0.0", "likely")


@pytest.mark.parametrize(
    "line",
    [
        "AttributeError: 'NoneType' object has no attribute 'shape'",
        "AttributeError: 'dict' object has no attribute 'input_ids'",
        "AttributeError: 'Net' object has no attribute 'generate'",
        "AttributeError: 'Trainer' object has no attribute 'my_own'",
        "AttributeError: partially initialized module 'datasets' has no attribute 'load_metric'",
        "ModuleNotFoundError: No module named 'trl'",
        "ModuleNotFoundError: No module named 'utils.misc'",
        "ImportError: cannot import name 'Net' from 'model'",
        "TypeError: forward() got an unexpected keyword argument 'labels'",
        "TypeError: main() got an unexpected keyword argument 'lr'",
        "KeyError: 'evaluation_strategy'",
        "RuntimeError: SFTTrainer.__init__() got an unexpected keyword argument 'tokenizer'",
    ],
)
def test_a_line_unrelated_to_releases_is_not_explained(line: str) -> None:
    assert explain(read_failure(line)) is None


def test_an_argument_that_never_existed_gets_the_nearest_name_as_possible() -> None:
    found = skew("TypeError: SFTConfig.__init__() got an unexpected keyword argument 'max_lenght'")
    assert (found.change, found.certainty, found.renamed_to) == (Change.NEVER, "possible", "max_length")


def test_a_run_that_continued_is_not_explained() -> None:
    steps = "\n".join(f"{{'loss': 0.{n}, 'epoch': {n}}}" for n in range(1, 9))
    assert explain(read_failure(f"{RENAMED}\n{steps}")) is None


def test_an_argument_is_tracked_when_its_class_changes_modules() -> None:
    # peft.LoraConfig has been in two modules; only the one in newer releases has the argument.
    assert argument_history("peft.LoraConfig", "use_dora").since == "0.9.0"


@given(st.sampled_from(["keyword", "name", "attribute"]), st.text(alphabet="abcXYZ_.", min_size=1, max_size=30))
def test_any_name_is_answered_without_failing(kind: str, name: str) -> None:
    line = {
        "keyword": f"TypeError: {name}.__init__() got an unexpected keyword argument 'tokenizer'",
        "name": f"ImportError: cannot import name 'x' from 'transformers.{name}'",
        "attribute": f"AttributeError: 'PPOTrainer' object has no attribute '{name}'",
    }[kind]
    found = explain(read_failure(line))
    assert found is None or found.package in packages()


def test_members_and_signatures_cover_the_same_releases() -> None:
    for package in packages():
        changed, known = members(package), table(package)
        assert changed is not None and known is not None and changed.releases == known.releases


@pytest.mark.slow
def test_diagnose_and_search_report_version_skew() -> None:
    reply = diagnose_log(f"step 1/9 loss 1.0\n{RENAMED}")
    assert reply.skew is not None and reply.skew.pin == "transformers<=4.50.3"
    assert not reply.collect
    searched = look_up(RENAMED)
    assert searched.skew == reply.skew
    assert look_up("loss is nan").skew is None


@pytest.mark.parametrize("change", list(Change))
def test_every_change_has_a_sentence(change: Change) -> None:
    reply = SkewReply(package="trl", name="trl.X", kind="name", change=change, certainty="likely", since="1.0.0")
    assert sentence_of(reply).startswith("trl.X ")


def test_a_warm_answer_does_not_unpack_tables_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = skew(RENAMED)
    monkeypatch.delattr(lzma, "decompress")
    assert lines_run(lambda: skew(RENAMED)) < 100_000
    assert skew(RENAMED) == first


def test_the_line_reader_finds_names_members_bases_and_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    from signature_tables.members import changes, read_text

    old = read_text(
        '"""Text:\n\nname = 1\n"""\nfrom a import (\n    B,  # why\n    c as d,\n)\n'
        "try:\n    import e.f\nexcept ImportError:\n    g = None\n\n\n"
        "class H(Base, Generic[T], metaclass=M):\n    i: int = 1\n\n    def j(self):\n        self.k = 1\n"
        "        local = 2\n\n    async def l(self): ...\n\n\ndef m():\n    n = 1\n",
        attributes=True,
    )
    assert old.names >= {"B", "d", "g", "H", "m"} and not old.names & {"name", "n", "c", "local"}
    assert (old.bases, old.members) == ({"H": ("Base", "Generic")}, {"H": {"i", "j", "k", "l"}})
    new = read_text("class H: ...\nclass Leaf(H): ...\ndef m(): ...", attributes=True)
    table = changes(["1", "2"], [{"p": old}, {"p": new}])
    assert table["names"]["p"]["B"] == [[0, 0]] and "m" not in table["names"]["p"]
    assert table["classes"]["H"][2]["j"] == [[0, 0]] and table["classes"]["Leaf"][1] == ["H"]


# ------------------------------------------------------------------------------------------ messages in the source

MASK = """\
Traceback (most recent call last):
  File "/job/train.py", line 9, in <module>
    trainer = GRPOTrainer(model, args=args)
  File "/venv/lib/python3.11/site-packages/{file}", line 400, in __init__
    raise ValueError(message)
{line}
"""


def test_a_message_is_traced_to_the_releases_that_raise_it() -> None:
    from gpuwarden.knowledge.message_origin import _table, origin

    content = _table("trl")
    newest = len(content["releases"]) - 1
    file, (kind, template, first, last) = next(
        (file, row)
        for file, rows in sorted(content["files"].items())
        for row in rows
        if row[0] == "ValueError" and "{}" in row[1] and row[2] > 0 and row[3] < newest
    )
    line = f"{kind}: {template.replace('{}', '17')}"
    found = origin(read_failure(MASK.format(file=file, line=line)))
    assert found is not None
    assert (found.package, found.file) == ("trl", file)
    assert (found.since, found.until) == (content["releases"][first], content["releases"][last])
    shown = diagnose_log(MASK.format(file=file, line=line)).origin
    assert shown is not None and shown.since == found.since
    # The same message from another file, of another type, or in the job's own code isn't the library's.
    assert origin(read_failure(MASK.format(file="trl/no_such_file.py", line=line))) is None
    assert origin(read_failure(MASK.format(file=file, line=line.replace("ValueError", "KeyError")))) is None
    assert (
        origin(read_failure(MASK.replace("/venv/lib/python3.11/site-packages/", "/job/").format(file=file, line=line)))
        is None
    )


def test_messages_are_read_with_their_placeholders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    from build_messages import table as spans
    from signature_tables.messages import read_messages

    source = """\
def f(x):
    if x:
        raise ValueError(
            f"The batch of {x} rows "
            "is too large."
        )
    warnings.warn("The name {} is going away soon".format(x))
    raise own.KindError("It has %d rows of data" % x)
    raise ValueError(message)
    raise TypeError("too short")
    raise RuntimeError(
"""
    assert {tuple(m) for m in read_messages(source)} == {
        ("ValueError", "The batch of {} rows is too large."),
        ("Warning", "The name {} is going away soon"),
        ("KindError", "It has {} rows of data"),
    }
    one = read_messages(source)
    assert all(row[2:] == [0, 1] for row in spans(["1", "2", "3"], [{"a.py": one}, {"a.py": one}, {}])["files"]["a.py"])


@given(st.text(max_size=60), st.lists(st.text(max_size=20), max_size=4))
def test_a_template_matches_its_filled_message(rest: str, fills: list[str]) -> None:
    from gpuwarden.knowledge.message_origin import begins

    template = "Expected {} rows" * len(fills) if fills else "Expected rows"
    message = template.format(*fills) + rest
    assert begins(message, template) and not begins("x" + message, template)
