"""Routes for approvals on a web page, which shows the same facts as the prompt at a terminal.

A passkey or a code from a terminal confirms an approval. Only a browser session can call these routes, from a page on
this server. A session alone can't approve, and tokens have no access. The signature covers the digest of the facts that
were shown; each challenge can be used only once.
"""

from __future__ import annotations

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute

from gpuwarden.core.errors import BadRequest, Conflict, Refused
from gpuwarden.core.guidance import Action, approval, do
from gpuwarden.core.states import Teardown
from gpuwarden.interfaces import results
from gpuwarden.interfaces.cli.approval import (
    awaits_approval,
    grant_spending,
    open_spending,
    ordered_by,
    request_facts,
    spending_digest,
    spending_facts,
)
from gpuwarden.interfaces.cli.drawing import local
from gpuwarden.interfaces.cli.page_code import allows_codes
from gpuwarden.interfaces.cli.wording import command, in_commands
from gpuwarden.interfaces.http.access import Protected, principal_of
from gpuwarden.interfaces.http.bodies import json_object
from gpuwarden.interfaces.http.pages.reading import headed
from gpuwarden.interfaces.http.pages.rendering import View, clean, page, shown, step_rows
from gpuwarden.interfaces.http.pages.webauthn_checks import (
    AGAIN,
    Challenges,
    Site,
    approval_options,
    registered,
    registration_options,
    signed_by,
)
from gpuwarden.interfaces.http.principals import Kind
from gpuwarden.interfaces.http.serving import Serving
from gpuwarden.lifecycle.teardown.approval_codes import use_code
from gpuwarden.lifecycle.teardown.gate import approve, proceed
from gpuwarden.lifecycle.teardown.passkeys import allowed, passkeys, record_use, register
from gpuwarden.people import acting_as, user_of

CHANNEL: Final = "page"
SUBMIT_AGAIN: Final = "Approved. Submit the job again to launch it."
LAUNCHED: Final = "Approved. The job will be launched the next time it is checked."


def approving_routes(serving: Serving) -> list[BaseRoute]:
    """Return the routes. Only browser sessions have access."""
    pages = ApprovalPages(serving)
    session: tuple[Kind, ...] = ("session",)
    found = [
        ("/approve/{ticket}", "GET", pages.question),
        ("/approve/{ticket}/challenge.json", "POST", pages.challenge),
        ("/approve/{ticket}/answer.json", "POST", pages.answer),
        ("/approve/{ticket}/code.json", "POST", pages.code),
        ("/approve/{ticket}/state.json", "GET", pages.state),
        ("/passkeys", "GET", pages.passkeys),
        ("/passkeys/challenge.json", "POST", pages.new_challenge),
        ("/passkeys/answer.json", "POST", pages.new_answer),
    ]
    return [
        Protected(path, headed(endpoint), needs="read", kinds=session, methods=[method])
        for path, method, endpoint in found
    ]


async def _body(request: Request) -> dict[str, Any]:
    """Return the JSON object in a request. A form on another page can't send the required content type."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise BadRequest("the content type is not application/json")
    return await json_object(request)


class ApprovalPages:
    """One server's approval and passkey pages."""

    def __init__(self, serving: Serving) -> None:
        self.ctx, self.settings = serving.ctx, serving.settings
        self.challenges = Challenges(serving.ctx)

    async def question(self, request: Request) -> Response:
        """Return the page with the facts to approve."""
        ticket = request.path_params["ticket"]
        view = clean(self.ctx, await self._facts(ticket))
        site = self.settings.local_url if request.url.hostname in {"127.0.0.1", "::1"} else ""
        here = [one for one in passkeys(self.ctx) if one.site == request.url.hostname]
        by_code = do(Action.APPROVE, ticket=ticket, code=principal_of(request).id)
        code = command(by_code) if allows_codes(self.ctx) else ""
        return page("approve.html", view, here="Now", ticket=ticket, ready=bool(here), open_at=site, code=code)

    async def _facts(self, ticket: str) -> View:
        """Return the facts to approve for a ticket or a receipt, with their digest. Raises NotFound or Conflict."""
        shell = command(approval(ticket))
        if ticket.startswith("r"):
            found = open_spending(self.ctx, ticket)
            issued = found.data
            facts = spending_facts(issued, ordered_by(self.ctx, ticket))
            return {
                "facts": [shown(text) for text in facts],
                "digest": spending_digest(found, facts),
                "blocked": False,
                "lists": {"steps": []},
                "open": awaits_approval(self.ctx, found),
                "until": local(issued.expires_at, "%m-%d %H:%M"),
                "command": shell,
                "title": f"Spend on {shown(issued.name)}",
                "job": issued.job or "",
            }
        seen = await proceed(self.ctx, ticket)
        record = seen.record
        blocked = record.state is Teardown.BLOCKED
        reply = results.worded(results.torn_down(seen), in_commands)
        return {
            "facts": [shown(text) for text in request_facts(seen)],
            "digest": record.digest or "",
            "blocked": blocked,
            "lists": {"steps": step_rows(seen.next_steps) if blocked else []},
            "open": record.state in {Teardown.AWAITING_HUMAN, Teardown.BLOCKED},
            "until": local(record.expires_at, "%m-%d %H:%M") if record.expires_at else "",
            "command": shell,
            "title": shown(reply.message),
            "job": record.job_id,
        }

    async def challenge(self, request: Request) -> Response:
        """Return the challenge that a passkey has to sign. The request contains the displayed facts' digest."""
        body, ticket = await _body(request), request.path_params["ticket"]
        if CHANNEL not in self.ctx.policy.approval.channels:
            raise Refused("the policy does not allow approval on the page", approval(ticket))
        site = Site.of(request.headers.get("origin", ""), self.settings)
        known = [one for one in passkeys(self.ctx) if one.site == site.host]
        if not known:
            raise Refused("no passkey is registered here", "Register one in a terminal: gpuwarden passkey add NAME.")
        facts = await self._facts(ticket)
        if not facts["open"]:
            raise Conflict("this request has already been answered")
        if not facts["digest"] or body.get("digest") != facts["digest"]:
            raise Refused("the facts have changed since they were shown", AGAIN)
        made = self.challenges.make(principal_of(request).id, ticket, facts["digest"])
        return JSONResponse({"ok": True, "options": approval_options(site, made, known)})

    async def code(self, request: Request) -> Response:
        """Approve the displayed facts. The request contains the one-time terminal code and the digest of the facts."""
        body, ticket = await _body(request), request.path_params["ticket"]
        if not allows_codes(self.ctx):
            raise Refused("the policy does not allow codes on the page", approval(ticket))
        facts = await self._facts(ticket)
        if not facts["open"] or facts["blocked"]:
            raise Conflict("this request can't be approved with a code")
        if not facts["digest"] or body.get("digest") != facts["digest"]:
            raise Refused("the facts have changed since they were shown", AGAIN)
        session, code = principal_of(request).id, str(body.get("code", ""))[:100]
        made = await use_code(self.ctx, ticket, facts["digest"], session, code)
        with acting_as(user_of(made.actor)):  # attribute the approval to the user who created the code
            return await self._approved(ticket, facts["digest"], f"one-time code of {made.data.by}")

    async def answer(self, request: Request) -> Response:
        """Approve the facts that the request's signature covers. A signature is accepted only once."""
        body, ticket = await _body(request), request.path_params["ticket"]
        site = Site.of(request.headers.get("origin", ""), self.settings)
        made = self.challenges.take(principal_of(request).id, ticket)
        passkey, count = signed_by(site, made, body.get("credential"), passkeys(self.ctx))
        with acting_as(passkey.person):  # the passkey's owner approves, regardless of the session's user
            record_use(self.ctx, passkey, made.digest, count)
            return await self._approved(ticket, made.digest, f"passkey {passkey.name}")

    async def _approved(self, ticket: str, seen: str, by: str) -> Response:
        """Record the approval of the facts with digest `seen`. Raises Refused or Conflict."""
        if not ticket.startswith("r"):
            found = await approve(self.ctx, ticket, seen, channel=CHANNEL, by=by)
            message = results.torn_down(found).message
            return JSONResponse(clean(self.ctx, {"ok": True, "message": shown(message)}))
        issued, facts = open_spending(self.ctx, ticket), await self._facts(ticket)
        allowed_here = CHANNEL in self.ctx.policy.approval.channels
        if facts["digest"] != seen or not facts["open"] or not allowed_here:
            raise Refused("the facts have changed since they were shown", AGAIN)
        grant_spending(self.ctx, issued, CHANNEL, by)
        return JSONResponse({"ok": True, "message": LAUNCHED if issued.data.job else SUBMIT_AGAIN})

    async def state(self, request: Request) -> Response:
        """Return the progress of an approved teardown.

        Each call also advances the teardown by one step.
        """
        found = await proceed(self.ctx, request.path_params["ticket"])
        message = shown(results.torn_down(found).message)
        under_way = found.record.state in {Teardown.APPROVED, Teardown.EXECUTING}
        return JSONResponse(clean(self.ctx, {"ok": True, "message": message, "under_way": under_way}))

    async def passkeys(self, _request: Request) -> Response:
        """Return the page with the registered passkeys and the form for a code from a terminal."""
        rows = [
            {"name": one.name, "site": one.site, "since": local(one.registered_at, "%Y-%m-%d %H:%M")}
            for one in passkeys(self.ctx)
        ]
        return page("passkeys.html", {"passkeys": rows}, here="")

    async def new_challenge(self, request: Request) -> Response:
        """Return the options that a browser needs to create a passkey. The request contains a code from a terminal."""
        body = await _body(request)
        site = Site.of(request.headers.get("origin", ""), self.settings)
        permit = allowed(self.ctx, str(body.get("code", ""))[:100])
        name = permit.subject.removeprefix("passkey/")
        made = self.challenges.make(principal_of(request).id, permit.subject, permit.data.code)
        known = [one for one in passkeys(self.ctx) if one.site == site.host]
        return JSONResponse({"ok": True, "options": registration_options(site, name, made, known)})

    async def new_answer(self, request: Request) -> Response:
        """Register the new passkey. The request contains the passkey and the same code, which is accepted only once."""
        body = await _body(request)
        site = Site.of(request.headers.get("origin", ""), self.settings)
        permit = allowed(self.ctx, str(body.get("code", ""))[:100])
        made = self.challenges.take(principal_of(request).id, permit.subject)
        register(self.ctx, permit, registered(site, made, body.get("credential")))
        name = permit.subject.removeprefix("passkey/")
        return JSONResponse({"ok": True, "message": f"You can now approve with the passkey {name}."})
