"""Convert text to search terms: stems, identifier parts, Chinese bigrams, concepts, and corrections of typos.

A *concept* is a set of phrases with one meaning, in English and Chinese (`concepts.txt`). Text with any of the phrases
gets the concept's term, so that "video memory is full", "OOM" and "显存不足" match each other.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import resources
from itertools import pairwise

STOP_WORDS = """
a an and are as at be been but by can could did do does doing for from get gets got had has have how i if in into is it
its just me my no not of on or our so than that the their them then there these they this to up was we were what when
which while who why will with would you your after before again also any anything every everything some something still
even only please help tell want need way thing seem seems look looks like
"""
STOP = frozenset(STOP_WORDS.split())
EVERYDAY_WORDS = """
able about above across actually add ago allow almost already although always another ask away bad base basic because
become best better big bit both bring build buy call cannot car care cause change cheap check child choose city clear
close come common complete content correct country course cut day deal decide deep difference different difficult do
easy effect effort enough example expect explain eye face fact fall family far fast feel find fine flat food friend
full game general give go good great grow hand happen hard hear heavy help hold home hope hot hour house however huge
idea important instead issue keep kind know large last late law learn leave left less let letter life light list
little live local long lot main make man many matter maybe mean mention middle minute moment money month more most
mother move much must near never new next nice night normal note nothing notice now number often ok old once open
order other own part past people perfect period person piece place plan play point possible pretty problem put
question quick quite real reason recent require rest right road room round rule safe say school second see separate
serious several short show side simple since sit small solution sort sound special stand state stay story strange
street strict strong stupid subject sudden sure take talk tell think thought time today together tomorrow tool top
topic toward town tree true try turn understand use user usual value various very visit war warm watch water week
weird well whole wide winter without woman wonder wood word work world worth wrong year yes yesterday yet young
"""
_WORD = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+)*", re.ASCII)
_CAMEL = re.compile(r"(?<=[a-z0-9]{2})(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]{2})")
_CJK = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]+")
LEAST_JOINED = 9
LEAST_MISSPELT = 6
MOST_EDITS = 2
STEMMED = 6
"""The maximum number of characters that `stem` removes, which limits the length of a word that is split in two."""
_VOWEL = re.compile(r"[aeiouy]")
_ASKED = re.compile(
    r"请问|请教|求助|求教|问一下|想问|想知道|各位|大佬|作者|您好|你好|谢谢|感谢|(?:这)?是?(?:因为)?什么(?:原因|情况|问题)(?:呢|啊|导致的?)?"
    r"|怎么(?:回事|办|解决)(?:呢|啊)?|如何解决|怎样解决|(?:应?该)?(?:怎么|怎样|如何)(?:操作|处理|设置|实现)"
    r"|为什么|为啥|有人遇到|遇到过|自己的?(?:数据集|数据|模型)"
)
"""Chinese forms of address, question words and words for the user's data, which occur in reports about any failure."""
CHINESE_STOP_WORDS = """
之后 以后 之前 还是 一个 可以 左右 时候 每次 不能 仍然 但是 或者 然后 并且 而且 已经 进行 比较 其他 情况
能不能 有没有 是不是 现在 目前 问题 出现 发现 提示 显示 变成 大概 过程 这个 那个 这种 这样 因为 所以 如果
应该 需要 为了 甚至 反而 后来 感觉 看起来 经常 直到 按照 使用 没有
的 了 是 在 我 就 都 也 还 吗 呢 把 和 与 从 到 对 用 着 又 再 会 能 让 给 请 中 时 后 前 里 上 下
"""
MOST_KEPT = 1 << 14
"""Maximum number of cached results. Texts repeat the same few thousand words, so caching them saves time."""
_STOP_CHINESE = re.compile("|".join(CHINESE_STOP_WORDS.split()))


@lru_cache(maxsize=MOST_KEPT)
def stem(word: str) -> str:
    """Remove the most common English endings, so that freeze, freezes and freezing usually give the same stem."""
    if len(word) < 4 or not word.isalpha():
        return word
    if word.endswith("ies") and len(word) > 4:
        word = word[:-3] + "y"
    elif word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    for ending in ("ing", "ed"):
        base = word.removesuffix(ending)
        if base != word and len(base) >= 3 and _VOWEL.search(base):
            double = len(base) > 3 and base[-1] == base[-2] and base[-1] not in "lsz"
            word = base[:-1] if double else base
            break
    return word[:-1] if word.endswith("e") and len(word) > 4 else word


def tokens(text: str) -> list[str]:
    """Return the stems of the words in `text`, in order; an identifier is followed by its parts."""
    found: list[str] = []
    for word in _WORD.findall(_CAMEL.sub(" ", unicodedata.normalize("NFKC", text)).lower()):
        parts = word.split("_")
        if len(parts) > 1:
            found.append(word)
        found += [stem(part) for part in parts if part not in STOP and _is_topical(part)]
    return found


@lru_cache(maxsize=MOST_KEPT)
def _is_topical(part: str) -> bool:
    """Return false for single letters, long numbers and hashes, which never indicate the topic of a text."""
    if part.isdigit():
        return len(part) <= 5
    return len(part) > 1 and not (len(part) >= 8 and any(c.isdigit() for c in part) and re.fullmatch("[0-9a-f]+", part))


@lru_cache(maxsize=1)
def everyday() -> frozenset[str]:
    """Return the stems of everyday words. They reveal little about the topic, even if they are rare in the entries."""
    return frozenset(map(stem, EVERYDAY_WORDS.split()))


@lru_cache(maxsize=1)
def concepts() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return two tables of concepts: one keyed by stemmed English phrase, the other by Chinese phrase."""
    english: dict[str, list[str]] = defaultdict(list)
    chinese: dict[str, list[str]] = defaultdict(list)
    text = resources.files("gpuwarden.knowledge").joinpath("concepts.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        name, _, phrases = line.partition(":")
        for phrase in (part.strip() for part in phrases.split(",")):
            table, key = (chinese, phrase.lower()) if _CJK.search(phrase) else (english, " ".join(tokens(phrase)))
            if key and f"~{name}" not in table[key]:
                table[key].append(f"~{name}")
    return dict(english), dict(chinese)


def english_concepts(stems: list[str]) -> Iterator[tuple[str, int, int]]:
    """Yield (concept, from, to) for every known phrase in the stems, longest first at each position.

    A phrase inside a longer phrase does not count separately: "GPU RAM" is not RAM.
    """
    table = concepts()[0]
    beyond = 0
    for at in range(len(stems)):
        for width in range(min(5, len(stems) - at), 0, -1):
            named = table.get(" ".join(stems[at : at + width]))
            if named is not None and at + width > beyond:
                yield from ((concept, at, at + width) for concept in named)
                beyond = max(beyond, at + width)
                break


def chinese_terms(text: str) -> tuple[list[str], list[str]]:
    """Return the concepts in the Chinese parts of `text`, and the character pairs of the words without a concept."""
    table = concepts()[1]
    longest = max(map(len, table), default=0)
    found: list[str] = []
    pairs: list[str] = []
    lowered = _ASKED.sub(" ", unicodedata.normalize("NFKC", text).lower())
    for run in _CJK.finditer(lowered):
        rest: list[str] = []
        at = run.start()
        while at < run.end():
            for width in range(min(longest, len(lowered) - at), 0, -1):
                named = table.get(lowered[at : at + width])
                if named is not None:
                    found += named
                    rest.append(" ")
                    at += width
                    break
            else:
                rest.append(lowered[at])
                at += 1
        left = _STOP_CHINESE.sub(" ", "".join(rest)).split()
        pairs += [a + b for piece in left for a, b in pairwise(piece)]
    return found, pairs


def terms(text: str) -> list[str]:
    """Return every search term for an indexed text: stems, concepts, character pairs, word pairs."""
    stems = tokens(text)
    found, pairs = chinese_terms(text)
    singles = [s for s in stems if "_" not in s]
    phrases = [f"{a} {b}" for a, b in pairwise(singles)]
    return [*stems, *(concept for concept, _, _ in english_concepts(singles)), *found, *pairs, *phrases]


class Speller:
    """Finds the known word nearest to an unknown word."""

    def __init__(self, known: Iterable[str]) -> None:
        self.known = {word for word in known if word.isalpha() and word.isascii() and len(word) >= 4}
        self._longest = max(map(len, self.known), default=0)
        self._grams: dict[str, set[str]] = defaultdict(set)
        for word in self.known:
            for gram in _trigrams(word):
                self._grams[gram].add(word)

    def parts(self, word: str) -> tuple[str, ...]:
        """Split an unknown word such as "googlecolab" into two known words. Return any other word unsplit."""
        if word in self.known or not word.isalpha() or not LEAST_JOINED <= len(word) <= 2 * self._longest + STEMMED:
            return (word,)
        halves = ((word[:at], stem(word[at:])) for at in range(4, len(word) - 3))
        known = [pair for pair in halves if pair[0] in self.known and pair[1] in self.known]
        return max(known, key=lambda pair: len(pair[0]), default=(word,)) if self.nearest(word) is None else (word,)

    def nearest(self, word: str) -> str | None:
        """Return the closest known word within one edit (two for words of at least 9 letters), or None.

        Short words have too many neighbors, so a short word only matches a known word with the same letters.
        """
        if word in self.known or not word.isalpha() or not 4 <= len(word) <= self._longest + MOST_EDITS:
            return None
        shared: dict[str, int] = defaultdict(int)
        for gram in _trigrams(word):
            for other in self._grams.get(gram, ()):
                shared[other] += 1
        allowed = 1 if len(word) < 9 else MOST_EDITS
        close = [
            (edits(word, other), -shared[other], other)
            for other in sorted(shared, key=lambda o: (-shared[o], o))[:40]
            if abs(len(other) - len(word)) <= allowed and (other[0] == word[0] or len(word) > 5)
        ]
        best = min(close, default=None)
        if best is None or best[0] > allowed:
            return None
        return best[2] if len(word) >= LEAST_MISSPELT or sorted(word) == sorted(best[2]) else None


def _trigrams(word: str) -> set[str]:
    padded = f"^{word}$"
    return {padded[i : i + 3] for i in range(len(padded) - 2)} | {padded[:2], padded[-2:]}


def edits(a: str, b: str) -> int:
    """Return the edit distance between two words. Swapping adjacent letters counts as one edit."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        now = [i]
        for j, y in enumerate(b, 1):
            cost = min(row[j] + 1, now[j - 1] + 1, row[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before[j - 2] + 1)
            now.append(cost)
        before, row = row, now
    return row[-1]
