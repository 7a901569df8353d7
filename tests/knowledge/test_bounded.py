"""A search is cheap for any text: the work for 64,000 characters of anything is bounded."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from counting import lines_run
from gpuwarden.interfaces.results import references
from gpuwarden.knowledge import decisions, shipped, words
from gpuwarden.knowledge.failure import Reading
from gpuwarden.knowledge.search import MAX_LINES, MAX_QUERY, both_ends, search
from gpuwarden.knowledge.words import Speller

WORK = 40_000
"""Maximum characters passed to `stem` and the speller in one search; a normal query needs under 2,000."""

FRAGMENTS = [
    "a", "A", "aB", "AaB", "1", "_", "a_", "e", "error", "cuda", " ", "\n", "\r", "x\n", "\t", "\u663e",
    "\u663e\u5b58\u4e0d\u8db3", "\ufdfa", "-", ".", "e\u0301", "'", "(", "deadbeef0", "OOM-001 ", "%|\u2588",
    'File "x", line 1, in y\n', "RuntimeError: CUDA out of memory\n",
]  # fmt: skip


class Work:
    """Counts the characters passed to the two expensive steps of a search."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = 0
        stem, nearest = words.stem, Speller.nearest

        def counted_stem(word: str) -> str:
            self.done += len(word)
            return stem(word)

        def counted_nearest(speller: Speller, word: str) -> str | None:
            self.done += len(word)
            return nearest(speller, word)

        monkeypatch.setattr(words, "stem", counted_stem)
        monkeypatch.setattr(Speller, "nearest", counted_nearest)

    def of(self, query: str) -> int:
        """Return the work of one search."""
        self.done = 0
        search(shipped(), query)
        return self.done


@pytest.fixture(scope="module")
def work() -> Work:
    with pytest.MonkeyPatch.context() as patch:
        search(shipped(), "warm")
        counted = Work(patch)
        yield counted


def filled(fragment: str) -> str:
    """Return a query of maximum length that repeats one fragment."""
    return (fragment * (MAX_QUERY // len(fragment) + 1))[:MAX_QUERY]


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=ascii)
def test_searching_64_000_repeated_characters_is_bounded(work: Work, fragment: str) -> None:
    assert work.of(filled(fragment)) <= WORK


mixed = st.lists(
    st.tuples(st.sampled_from(FRAGMENTS) | st.text(max_size=30), st.integers(1, 3_000)), min_size=1, max_size=12
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mixed)
def test_searching_64_000_mixed_characters_is_bounded(work: Work, parts: list[tuple[str, int]]) -> None:
    query = filled("".join(fragment * times for fragment, times in parts) or " ")
    assert work.of(query) <= WORK


@pytest.mark.slow
def test_searching_every_signature_repeated_is_bounded(work: Work) -> None:
    signatures = sorted({s for g in shipped().gotchas.values() for s in g.signatures})
    everything = "\n".join(f"{n} {s * 5}" for n, s in enumerate(signatures))
    for start in range(0, len(everything), MAX_QUERY):
        assert work.of(everything[start : start + MAX_QUERY]) <= WORK


@given(st.text(alphabet="etaoinsrdgy", min_size=9, max_size=60))
def test_a_long_word_is_split_like_an_unbounded_search(word: str) -> None:
    """The bound on word length loses no split and no spelling that an unbounded search finds."""
    speller = Speller(["training", "dataset", "rating", "string", "storage", "address", "testing"])
    halves = ((word[:at], words.stem(word[at:])) for at in range(4, len(word) - 3))
    known = [pair for pair in halves if pair[0] in speller.known and pair[1] in speller.known]
    if known and word not in speller.known and speller.nearest(word) is None:
        assert speller.parts(word) == max(known, key=lambda pair: len(pair[0]))


@pytest.mark.parametrize("second", ["training", "storages", "trainings", "stringing", "addressed"])
def test_two_joined_known_words_are_split_with_any_ending(second: str) -> None:
    speller = Speller(["training", "storage", "string", "address", words.stem(second)])
    assert speller.parts(f"training{second}") == ("training", words.stem(second))


def test_the_beginning_and_the_end_of_many_lines_are_read() -> None:
    middle = "step\n" * (3 * MAX_LINES)
    found = search(shipped(), f"{middle}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert found and found[0].how == "signature"
    assert len(both_ends(middle).splitlines()) == MAX_LINES


def test_look_up_reads_a_bounded_part_of_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(decisions, "for_words", lambda text: seen.append(len(text)))
    references.look_up("x" * 4_000_000)
    assert seen and max(seen) <= MAX_QUERY + 1


def test_weighing_many_step_lines_costs_little_per_line() -> None:
    reading = Reading("step 1 loss 2.5\n" * MAX_LINES)
    assert lines_run(lambda: [reading.weight(at) for at in range(MAX_LINES)]) < 100 * MAX_LINES
