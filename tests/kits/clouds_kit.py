"""Contract for providers over HTTP: reject garbage, lose no instance, leak no key."""

from __future__ import annotations

import json
import os
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clouds.base import KEY, KEY_2, PUBLIC_KEY, Emulator, Fault, Kind, Refuse, Web
from clouds.platform import Platform
from clouds.specs import Spec
from contract_provider import Desk, ProviderContract, ProviderTests, Rig, known
from gpuwarden import __version__
from gpuwarden.core.errors import AuthFailed, BadRequest, NotSupported, RateLimited, WardenError
from gpuwarden.core.models import Answer, Balance, InstanceState, Known, Resources, Unknown
from gpuwarden.core.rules import Severity
from gpuwarden.interfaces.mcp.wording import in_calls
from gpuwarden.providers.base import account_keys
from gpuwarden.rehearsal.model import Faults
from paths import ROOT
from rehearsal_kit import HandClock

SPECS = os.environ.get("GPUWARDEN_SPECS")
GARBAGE: tuple[Kind, ...] = ("html", "truncated", "error_500", "empty", "lost_request", "lost_reply")


@cache
def _started() -> Web:
    """Start this process's only web server. A fixture would be created once per module that imports it."""
    return Web().start()


@pytest.fixture(scope="session")
def web() -> Web:
    """Return the web server of this run; its thread ends with the process."""
    return _started()


@dataclass
class CloudRig(Rig):
    """A provider, its account, and the requests that create, list and get instances."""

    cloud: Emulator
    env: dict[str, str]
    kind: Platform

    def use_account(self, which: int) -> None:
        self.env[self.kind.provider.api.key_variable] = (KEY, KEY_2)[which]

    def replace_key(self) -> None:
        self.cloud.key = self.env[self.kind.provider.api.key_variable] = f"{KEY}-new"

    def stray_404(self, ident: str) -> None:
        with pytest.raises(Refuse) as refused:
            self.cloud.need("no-such-instance")
        reply = refused.value.reply
        self.cloud.faults = [Fault("other", self.kind.gets, count=10**6, status=reply.status, body=reply.raw())]

    def refuse(self, *, makes: bool, names: bool = False) -> None:
        body = b"" if names else self.cloud.undescribed("order").raw()
        self.cloud.faults = [Fault("refused" if makes else "other", self.kind.creates, status=400, body=body)]

    def blind(self, *, now: bool) -> None:
        self.cloud.faults = [f for f in self.cloud.faults if f.match != self.kind.lists]
        self.cloud.faults += [Fault("html", self.kind.lists, count=10**6)] if now else []

    def lists_at_once(self) -> None:
        self.cloud.cloud.configure(faults=Faults())

    def rented(self) -> list[str]:
        return [ident for ident in self.cloud.own if self.cloud.cloud.truth(ident).state is not InstanceState.GONE]


class CloudTests(ProviderTests):
    """Base class of the tests of one platform."""

    platform: Platform

    @pytest.fixture
    def rig(self, tmp_path: Path, web: Web) -> CloudRig:
        return self.make(tmp_path, web)

    def make(self, folder: Path, web: Web) -> CloudRig:
        clock = HandClock()
        cloud = self.platform.account(folder, clock)
        api = self.platform.provider.api
        env = {
            api.key_variable: KEY,
            api.url_variable: web.add(cloud),
            "GPUWARDEN_SSH_PUBLIC_KEY": PUBLIC_KEY,
            **dict(self.platform.env),
        }
        provider = self.platform.provider(cloud.profile, clock, env)

        async def settle() -> None:
            await clock.sleep(60)

        other = self.platform.account(folder / "other", clock)
        other.key, other.user = KEY_2, 8
        cloud.others.append(other)
        return CloudRig(
            provider, settle, clock, folder, cloud.profile.id, cloud, env, self.platform,
            resources=Resources(gpu=self.platform.gpu), names_account=self.platform.names_account,
        )  # fmt: skip


class CloudContract(CloudTests, ProviderContract):
    """The contract, for the platform of a subclass."""

    async def test_the_emulator_answers_as_published(self, rig: CloudRig) -> None:
        """Take one instance through its life, provoke some refusals, and check every reply against the description."""
        if SPECS is None or (spec := self.platform.spec) is None:
            pytest.skip("GPUWARDEN_SPECS is not set, or this interface has no published description")
        if not (Path(SPECS) / spec[0]).exists():
            pytest.skip(f"{spec[0]} is not in GPUWARDEN_SPECS")
        verbs = rig.provider.profile.verbs
        known(await rig.provider.quote(rig.resources))
        instance = await self.rent(rig)
        await rig.provider.check()
        if self.platform.gets_balance:
            known(await rig.provider.balance())
        if rig.names_account:
            known(await rig.provider.account_id())
        if verbs.stop:
            known(await rig.provider.stop(instance.id))
            await rig.settle()
            known(await rig.provider.list())
        if "stop" in verbs.reversible:
            known(await rig.provider.start(instance.id))
            await rig.settle()
        await self.down(rig, instance.id)
        await rig.provider.get(instance.id)
        rig.env[self.platform.provider.api.key_variable] = "wrong-key"
        with pytest.raises(AuthFailed):
            await rig.provider.list()
        faults = [f for exchange in rig.cloud.exchanges for f in Spec(Path(SPECS) / spec[0], spec[1]).faults(*exchange)]
        unexpected = [f for f in faults if not any(gap in f for gap in self.platform.gaps)]
        assert not unexpected, unexpected

    # -------------------------------------------------------------------------------------------------- lost replies

    async def test_a_lost_create_reply_is_unknown_and_the_instance_is_found(self, rig: CloudRig) -> None:
        rig.cloud.faults = [Fault("lost_reply", self.platform.creates)]
        assert isinstance(await rig.provider.create(rig.resources, "token-1"), Unknown)
        await rig.settle()
        found = known(await rig.provider.find("token-1"))
        assert len(found) == 1 and found[0].token == "token-1"
        assert len(rig.cloud.own) == 1

    @pytest.mark.parametrize("kind", ["lost_request", "error_500", "html", "truncated", "empty"])
    async def test_an_ambiguous_create_is_unknown(self, rig: CloudRig, kind: Kind) -> None:
        rig.cloud.faults = [Fault(kind, self.platform.creates)]
        assert isinstance(await rig.provider.create(rig.resources, "token-1"), Unknown)
        await rig.settle()
        assert len(known(await rig.provider.find("token-1"))) == (0 if kind == "lost_request" else 1)

    async def test_a_lost_terminate_reply_is_unknown_and_can_be_retried(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        if rig.provider.profile.verbs.terminate_needs_stop:
            known(await rig.provider.stop(instance.id))
            await rig.settle()
        rig.cloud.faults = [Fault("lost_reply", self.platform.ends)]
        assert isinstance(await rig.provider.terminate(instance.id), Unknown)
        await rig.settle()
        known(await rig.provider.terminate(instance.id))
        assert rig.cloud.cloud.truth(rig.cloud.inner(instance.id)).state is InstanceState.GONE

    async def test_a_rate_limited_create_is_not_retried(self, rig: CloudRig) -> None:
        rig.cloud.faults = [Fault("limited", self.platform.creates, count=9)]
        with pytest.raises(RateLimited):
            await rig.provider.create(rig.resources, "token-1")
        assert rig.cloud.faults[0].count == 8
        assert rig.cloud.own == {}

    # ------------------------------------------------------------------------------------------------------- garbage

    @pytest.mark.parametrize("kind", GARBAGE)
    async def test_a_garbage_reply_is_unknown(self, rig: CloudRig, kind: Kind) -> None:
        instance = await self.rent(rig)
        for match, ask in (
            (self.platform.lists, rig.provider.list),
            (self.platform.lists, lambda: rig.provider.find("token-1")),
            (self.platform.gets, lambda: rig.provider.get(instance.id)),
        ):
            rig.cloud.faults = [Fault(kind, match, count=9)]
            answer: Answer[Any] = await ask()
            assert isinstance(answer, Unknown), answer
            assert KEY not in answer.why

    def test_random_replies_never_make_instances_vanish(self, tmp_path: Path, web: Web) -> None:
        """Send random JSON and damaged replies: only the platform's own messages may mean "none" or "gone"."""
        rig = self.make(tmp_path, web)
        instance = anyio.run(self.rent, rig)
        anyio.run(rig.provider.list)
        anyio.run(rig.provider.get, instance.id)
        true = [reply.body for request, reply in rig.cloud.exchanges[-6:] if request.method in {"GET", "POST"}]

        @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(st.data())
        def attack(data: st.DataObject) -> None:
            body = data.draw(st.one_of(ANY_JSON, damaged(true)))
            status = data.draw(st.sampled_from([200, 200, 200, 201, 204, 302, 404, 404, 410, 500, 502]))
            raw = json.dumps(body).encode()
            if data.draw(st.booleans()):
                raw = raw[: data.draw(st.integers(0, len(raw)))]
            anyio.run(self._attacked, rig, instance.id, status, raw)

        attack()

    async def _attacked(self, rig: CloudRig, ident: str, status: int, raw: bytes) -> None:
        everything = r"."
        rig.cloud.faults = [Fault("other", everything, count=10**6, status=status, body=raw)]
        for ask in (rig.provider.list, lambda: rig.provider.find("token-1"), lambda: rig.provider.get(ident)):
            try:
                answer: Answer[Any] = await ask()
            except WardenError:
                continue
            assert isinstance(answer, Unknown) or self.may_be_said(status, raw, answer.value), (status, raw, answer)

    def may_be_said(self, status: int, raw: bytes, value: object) -> bool:
        """Return whether a reply may be parsed as `value`: it names instances, or explicitly reports none."""
        body = json.loads(raw) if raw and not value else None
        return bool(value) or (isinstance(body, dict) and self.platform.reports_no_instances(status, body))

    # ------------------------------------------------------------------------------------------------------- balance

    async def test_the_balance_is_reported_or_unsupported(self, rig: CloudRig) -> None:
        if self.platform.gets_balance is None:
            with pytest.raises(NotSupported):
                await rig.provider.balance()
            assert rig.cloud.requests == []
            return
        for money in (25.0, 0.0, -1.5):
            rig.cloud.money = money
            balance = known(await rig.provider.balance())
            assert (balance.amount, balance.currency) == (pytest.approx(money), "USD")
        assert rig.cloud.requests and all(re.search(self.platform.gets_balance, a.line) for a in rig.cloud.requests)

    @pytest.mark.parametrize("kind", GARBAGE)
    async def test_an_unreadable_balance_is_unknown(self, rig: CloudRig, kind: Kind) -> None:
        if self.platform.gets_balance is None:
            return
        rig.cloud.faults = [Fault(kind, self.platform.gets_balance)]
        answer = await rig.provider.balance()
        assert isinstance(answer, Unknown) and KEY not in answer.why

    def test_a_damaged_balance_reply_never_invents_an_amount(self, tmp_path: Path, web: Web) -> None:
        if self.platform.gets_balance is None:
            return
        rig = self.make(tmp_path, web)
        rig.cloud.money = 25.0
        anyio.run(rig.provider.balance)
        (_, true), asks = rig.cloud.exchanges[-1], self.platform.gets_balance
        numbers = set(re.findall(r"-?\d+(?:\.\d+)?", json.dumps(true.body)))

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        @given(damaged([true.body], st.none() | st.text(max_size=3) | st.just([])))
        def attack(body: object) -> None:
            rig.cloud.faults = [Fault("other", asks, body=json.dumps(body).encode())]
            try:
                answer: Answer[Balance] = anyio.run(rig.provider.balance)
            except WardenError:
                return
            amount = answer.value.amount if isinstance(answer, Known) else None
            assert amount is None or amount == pytest.approx(25.0) or str(amount) in numbers, (body, answer)

        attack()

    # ---------------------------------------------------------------------------------------------------------- keys

    async def test_a_wrong_key_error_never_contains_the_key(self, rig: CloudRig) -> None:
        wrong = "wrong-key-9876543210-abcdef"
        rig.env[self.platform.provider.api.key_variable] = wrong
        calls = (
            rig.provider.list,
            lambda: rig.provider.find("token-1"),
            lambda: rig.provider.get(self.platform.ident),
            lambda: rig.provider.create(rig.resources, "token-1"),
            lambda: rig.provider.terminate(self.platform.ident),
        )
        for call in calls:
            with pytest.raises(AuthFailed) as caught:
                await call()
            assert wrong not in f"{caught.value!r} {caught.value.message} {in_calls(caught.value.next_steps)}"
        findings = await rig.provider.check()
        assert [f.severity for f in findings] == [Severity.ERROR]
        assert wrong not in findings[0].model_dump_json()

    def test_the_key_is_one_that_no_job_is_given(self) -> None:
        variable = self.platform.provider.api.key_variable
        assert {variable, f"{variable}_FILE"} <= account_keys()

    async def test_without_a_key_nothing_is_sent(self, rig: CloudRig) -> None:
        del rig.env[self.platform.provider.api.key_variable]
        with pytest.raises(AuthFailed) as caught:
            await rig.provider.list()
        assert self.platform.provider.api.key_variable in in_calls(caught.value.next_steps)
        assert rig.cloud.requests == []

    async def test_an_echoed_key_is_redacted(self, rig: CloudRig) -> None:
        body = json.dumps(dict.fromkeys(("detail", "message", "msg", "error", "title"), f"bad key {KEY}")).encode()
        for status in (400, 401, 403, 500):
            rig.cloud.faults = [Fault("other", ".", count=99, status=status, body=body)]
            try:
                answer = await rig.provider.list()
                assert isinstance(answer, Unknown)
                text = answer.why
            except WardenError as error:
                text = error.message
            assert KEY not in text
        assert KEY not in repr(vars(rig.provider)).replace(repr(rig.env), "")

    async def test_ids_never_become_paths(self, rig: CloudRig) -> None:
        for ident in ("../account", "a/b", "a?b=c", "", "a b", "\u0661", "-x", "x" * 300, "%2e%2e"):
            assert known(await rig.provider.get(ident)) is None
            known(await rig.provider.terminate(ident))
        assert rig.cloud.requests == []

    async def test_a_list_with_an_unusable_id_is_unknown(self, rig: CloudRig) -> None:
        instance = await self.rent(rig)
        known(await rig.provider.list())
        body = next(
            reply.body
            for request, reply in reversed(rig.cloud.exchanges)
            if re.search(self.platform.lists, request.line)
        )
        text = json.dumps(body).replace(instance.id, "../account")
        assert text != json.dumps(body)
        rig.cloud.faults = [Fault("other", self.platform.lists, body=text.encode())]
        assert isinstance(await rig.provider.list(), Unknown)

    async def test_a_token_unfit_for_a_name_is_refused(self, rig: CloudRig) -> None:
        for token in ("", "a b", "a/b", "x" * 2000, "a\nb", "é"):
            with pytest.raises(BadRequest):
                await rig.provider.create(rig.resources, token)
        assert rig.cloud.own == {}

    # --------------------------------------------------------------------------------------------------- rate limits

    # ----------------------------------------------------------------------------------------------- intermediaries

    @pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 409, 422])
    async def test_an_intermediarys_error_page_is_unknown(self, rig: CloudRig, status: int) -> None:
        instance = await self.rent(rig)
        pages = (
            b"<html><title>Access denied | Error 1010</title></html>",
            b"error code: 1010",
            b"",
            b'"Forbidden"',
            b'{"reason": "blocked by the network of your company"}',
            b'{"title": "Error 1010", "status": %d, "detail": "no", "message": "no", "code": "NOT_FOUND",'
            b' "error": "not_found", "error_code": 1010, "cloudflare_error": true}' % status,
        )
        for page in pages:
            rig.cloud.faults = [Fault("other", ".", count=99, status=status, body=page)]
            for answer in (
                await rig.provider.list(),
                await rig.provider.get(instance.id),
                await rig.provider.terminate(instance.id),
            ):
                assert isinstance(answer, Unknown) and "intermediary" in answer.why
            findings = await rig.provider.check()
            assert [f.severity for f in findings] == [Severity.UNKNOWN]
            rig.cloud.faults = [Fault("other", self.platform.creates, status=status, body=page)]
            assert isinstance(await rig.provider.create(rig.resources, "token-1"), Unknown)

    async def test_requests_carry_the_user_agent(self, rig: CloudRig) -> None:
        await rig.provider.list()
        project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text("utf-8"))["project"]
        agent = f"{project['name']}/{__version__} (+{project['urls']['Homepage']})"
        assert rig.cloud.requests[-1].headers["user-agent"] == agent

    @pytest.mark.attack("spending", "refuses a create and names the new machine in the refusal")
    @pytest.mark.parametrize("status", [400, 402, 409, 410, 422, 500, 503])
    async def test_an_error_naming_an_instance_is_not_a_refusal(self, rig: CloudRig, status: int) -> None:
        rig.cloud.faults = [Fault("refused", self.platform.creates, status=status)]
        answer = await rig.provider.create(rig.resources, "token-1")
        assert isinstance(answer, Known) or "instance" in answer.why
        assert len(rig.cloud.own) == 1

    async def test_the_account_id_is_fetched_once_per_key(self, rig: CloudRig) -> None:
        if not rig.names_account:
            return
        first = known(await rig.provider.account_id())
        request = len(rig.cloud.requests)
        assert known(await rig.provider.account_id()) == first and len(rig.cloud.requests) == request
        rig.env[self.platform.provider.api.key_variable] = KEY_2
        assert known(await rig.provider.account_id()) != first

    @pytest.mark.attack("ending", "names another address of the platform, where a server calls itself the account's")
    async def test_lookups_at_another_api_address_are_unknown(self, rig: CloudRig) -> None:
        if not rig.names_account:
            return
        desk = Desk(rig, rig.resources.gpu)
        await desk.rent()
        rig.provider.client.url = rig.provider.client.url.replace("127.0.0.1", "localhost")
        for answer in await desk.looks():
            assert isinstance(answer, Unknown) and "account" in answer.why
        desk.ctx.ledger.close()

    @pytest.mark.parametrize("kind", GARBAGE)
    async def test_an_unreadable_account_is_unknown_and_not_cached(self, rig: CloudRig, kind: Kind) -> None:
        if not rig.names_account:
            return
        rig.cloud.faults = [Fault(kind, ".")]
        assert isinstance(await rig.provider.account_id(), Unknown)
        assert isinstance(await rig.provider.account_id(), Known), "a failure is not remembered"

    async def test_a_read_waits_out_a_short_rate_limit(self, rig: CloudRig) -> None:
        await self.rent(rig)
        rig.cloud.faults = [Fault("limited", self.platform.lists, count=2, headers={"Retry-After": "3"})]
        before = rig.clock.now()
        assert len(known(await rig.provider.list())) == 1
        assert rig.clock.now() - before >= 6

    async def test_a_long_rate_limit_raises_with_its_delay(self, rig: CloudRig) -> None:
        rig.cloud.faults = [Fault("limited", ".", count=99, headers={"Retry-After": "60"})]
        with pytest.raises(RateLimited) as caught:
            await rig.provider.list()
        assert caught.value.after_s == 60

    async def test_an_endless_rate_limit_raises(self, rig: CloudRig) -> None:
        rig.cloud.faults = [Fault("limited", ".", count=99, headers={"Retry-After": "1"})]
        with pytest.raises(RateLimited):
            await rig.provider.list()


JSON_LEAF = st.none() | st.booleans() | st.integers(-3, 10**6) | st.floats(allow_nan=False) | st.text(max_size=6)
WORDS = "id name pods data instances items list success code msg error status hasMore total_count result_total"
NAMES = st.sampled_from(WORDS.split())
ANY_JSON = st.recursive(
    JSON_LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


def damaged(bodies: list[Any], instead: st.SearchStrategy[Any] = ANY_JSON) -> st.SearchStrategy[Any]:
    """Return a strategy of real replies with one part removed or replaced."""

    @st.composite
    def one(draw: st.DrawFn) -> Any:
        body = json.loads(json.dumps(draw(st.sampled_from([b for b in bodies if b] or [{}]))))
        at = body
        for _ in range(draw(st.integers(0, 4))):
            keys = list(at) if isinstance(at, dict) else list(range(len(at))) if isinstance(at, list) else []
            inner = [k for k in keys if isinstance(at[k], dict | list) and at[k]]
            if not inner:
                break
            at = at[draw(st.sampled_from(inner))]
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if keys:
            key = draw(st.sampled_from(keys))
            if draw(st.booleans()):
                del at[key]
            else:
                at[key] = draw(instead)
        return body

    return one()
