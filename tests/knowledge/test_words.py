"""Words: matching stems, recognized typos, and concepts in two languages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.knowledge import shipped
from gpuwarden.knowledge.search import index_of
from gpuwarden.knowledge.words import Speller, chinese_terms, concepts, edits, english_concepts, stem, terms, tokens

FAMILIES = [
    ("freeze", "freezes", "freezing"),
    ("stop", "stopped", "stopping", "stops"),
    ("retry", "retries"),
    ("cache", "caches"),
]
TYPOS = {"memmory": "memory", "chekpoint": "checkpoint", "evalution": "evaluation", "timout": "timeout"}
PHRASES = {"ran out of memory": "~oom", "显存不足": "~oom", "关机": "~stop", "too many requests": "~rate"}


@pytest.mark.parametrize("family", FAMILIES)
def test_forms_of_a_word_share_a_stem(family: tuple[str, ...]) -> None:
    assert len({stem(word) for word in family}) == 1


@pytest.mark.parametrize("word", ["loss", "bus", "gpu", "nan", "137", "max_length", "this"])
def test_words_without_an_ending_are_unchanged(word: str) -> None:
    assert stem(word) == word


def test_identifiers_are_found_whole_and_in_parts() -> None:
    parts = [stem(part) for part in ("cublas", "status", "alloc", "failed")]
    assert tokens("CUBLAS_STATUS_ALLOC_FAILED") == ["cublas_status_alloc_failed", *parts]
    assert tokens("ChildFailedError") == ["child", "fail", "error"]
    assert tokens("mAP of 8 GPUs") == ["map", "8", stem("gpus")]


@pytest.mark.parametrize(("text", "concept"), PHRASES.items())
def test_phrases_of_both_languages_have_a_concept(text: str, concept: str) -> None:
    assert concept in terms(text)


def test_chinese_question_phrases_and_possessives_are_not_terms() -> None:
    assert chinese_terms("请问各位大佬 这是什么原因呢 怎么解决") == ([], [])
    assert chinese_terms("训练自己的数据集") == chinese_terms("训练")


def test_a_longer_chinese_phrase_wins_and_the_rest_stays() -> None:
    found, pairs = chinese_terms("显存不足处理")
    assert "~oom" in found
    assert "处理" in pairs


def test_every_concept_has_at_least_two_phrases() -> None:
    english, chinese = concepts()
    count: dict[str, int] = {}
    for names in [*english.values(), *chinese.values()]:
        for name in names:
            count[name] = count.get(name, 0) + 1
    assert {name for name, n in count.items() if n < 2} == set()
    assert [c for c, _, _ in english_concepts(["out", "memory"])] != []


@pytest.mark.parametrize(("wrong", "right"), TYPOS.items())
def test_a_typo_is_corrected(wrong: str, right: str) -> None:
    assert Speller(["memory", "checkpoint", "evaluation", "timeout", "dataset"]).nearest(wrong) == right


@pytest.mark.parametrize("word", ["memory", "cat", "sourdough", "c4t5", ""])
def test_known_short_or_distant_words_are_not_corrected(word: str) -> None:
    assert Speller(["memory", "checkpoint"]).nearest(word) is None


def test_a_short_word_is_corrected_only_to_the_same_letters() -> None:
    speller = Speller(["reach", "train", "model"])
    assert (speller.nearest("react"), speller.nearest("trian"), speller.nearest("modle")) == (None, "train", "model")


def test_two_joined_words_are_split_only_if_both_are_known() -> None:
    speller = Speller(["google", "colab", "memory", "checkpoint"])
    assert speller.parts("googlecolab") == ("google", "colab")
    assert [speller.parts(word) for word in ("checkpoint", "colabs", "sourdoughbread")] == [
        ("checkpoint",),
        ("colabs",),
        ("sourdoughbread",),
    ]


def test_a_word_inside_a_longer_phrase_takes_the_phrases_meaning() -> None:
    assert {concept for concept, _, _ in english_concepts(["gpu", "ram"])} == {"~vram"}
    assert {concept for concept, _, _ in english_concepts(["ram"])} == {"~hostram"}


def test_everyday_words_and_counts_weigh_less_than_codes_and_terms() -> None:
    index = index_of(shipped())
    assert max(index.rarity(word) for word in (stem("people"), stem("strange"), "17", "100")) <= 1.5
    assert min(index.rarity(word) for word in ("inode", "colab", "429")) > 2


@given(st.text("abcd", max_size=7), st.text("abcd", max_size=7))
def test_edits_is_a_distance(a: str, b: str) -> None:
    assert edits(a, b) == edits(b, a)
    assert (edits(a, b) == 0) == (a == b)
    assert abs(len(a) - len(b)) <= edits(a, b) <= max(len(a), len(b))


def test_chinese_function_words_are_not_terms() -> None:
    assert chinese_terms("但是这个鳄鱼的帽子") == ([], ["鳄鱼", "帽子"])
