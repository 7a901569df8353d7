"""The tool teardown_request, and the question that it may ask the user in the client."""

# No `from __future__ import annotations` here: the SDK evaluates the annotations of tools defined in a function.
from typing import TYPE_CHECKING, Annotated, Any, Final

from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.elicitation import AcceptedElicitation, ElicitationResult
from mcp.server.mcpserver import Context as ClientContext
from mcp.server.mcpserver import Elicit, MCPServer, Resolve
from mcp_types import CallToolResult
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from gpuwarden.core.models import Verb
from gpuwarden.core.money import usd, usd_per_hour
from gpuwarden.core.plural import counted
from gpuwarden.core.sanitize import line
from gpuwarden.core.states import Teardown
from gpuwarden.interfaces import results
from gpuwarden.interfaces.mcp.tools.base import ENDS, JobId, answer

if TYPE_CHECKING:
    from gpuwarden.lifecycle.context import Context
    from gpuwarden.lifecycle.teardown.gate import TeardownView
else:
    TeardownView = Any  # the SDK evaluates annotations; importing the gate would double the server's start time

CHANNEL: Final = "elicitation"


class ApprovalForm(BaseModel):
    """The form in which the user approves or declines a teardown."""

    # Some clients return an empty form without showing it, so only true and false count as answers.
    model_config = ConfigDict(json_schema_extra={"required": ["approve"]})
    approve: Annotated[bool | None, BeforeValidator(lambda value: value if isinstance(value, bool) else None)] = Field(
        None, description="End the machine and delete the listed files"
    )


class NotAsked(BaseModel):
    """Returned instead of a form if the user is not asked."""


def add(server: MCPServer[Any], ctx: "Context") -> None:
    """Add the tool to a server."""

    async def look(job_id: str, verb: Verb) -> TeardownView:
        """Return the current request. It is resolved once per call, so that the user approves the facts that were
        shown.
        """
        from gpuwarden.lifecycle.teardown.gate import request

        return await request(ctx, job_id, verb)

    async def ask_user(
        view: Annotated[TeardownView, Resolve(look)], client: ClientContext[Any, Any]
    ) -> Elicit[ApprovalForm] | NotAsked:
        """Ask the user in the client if the client supports forms and every proof is present."""
        from gpuwarden.ledger.events import ApprovalDeclined, ApprovalUnanswered

        asks = view.record.state is Teardown.AWAITING_HUMAN and view.complete
        declared = client.client_capabilities.elicitation if client.client_capabilities else None
        # A client that declares support only for URLs does not show forms.
        shows_forms = declared is not None and (declared.form is not None or declared.url is None)
        kinds = (ApprovalDeclined, ApprovalUnanswered)
        before = (ctx.ledger.last(view.record.subject, kind) for kind in kinds)
        if any(elicited is not None and elicited.data.digest == view.record.digest for elicited in before):
            return NotAsked()  # ask only once about the same facts
        if not asks or CHANNEL not in ctx.policy.approval.channels:
            return NotAsked()
        if not shows_forms:
            ctx.ledger.add(view.record.subject, ApprovalUnanswered(digest=view.record.digest, how="no form"))
            return NotAsked()
        return Elicit(question(view), ApprovalForm)

    @server.tool(annotations=ENDS)
    async def teardown_request(
        job_id: JobId,
        verb: Annotated[Verb, Field(description="How to end it")],
        view: Annotated[TeardownView, Resolve(look)],
        elicited: Annotated[ElicitationResult[ApprovalForm], Resolve(ask_user)],
        client: ClientContext[Any, Any],
    ) -> Annotated[CallToolResult, results.TeardownReply]:
        """Request to stop or terminate a job's machine. Refused until its outputs are pulled and proven; then the user
        approves with `gpuwarden approve`. No argument approves it. Call again for progress.
        """
        from gpuwarden.ledger.events import ApprovalDeclined, ApprovalUnanswered
        from gpuwarden.lifecycle.teardown.gate import approve, proceed
        from gpuwarden.lifecycle.teardown.orders import hold_machine

        form = elicited.data if isinstance(elicited, AcceptedElicitation) else None
        choice = form.approve if isinstance(form, ApprovalForm) else None
        if choice:
            assert view.record.digest is not None
            params = client.request_context.session.client_params
            info = f"client {params.client_info.name} {params.client_info.version}" if params else "client"
            if (token := get_access_token()) is not None:  # over HTTP, the token has a name that the user chose
                info = f"token {token.subject}, {info}"
            await approve(ctx, view.record.id, view.record.digest, channel=CHANNEL, by=line(info, 120))
            return answer(ctx, results.torn_down(await proceed(ctx, view.record.id)))
        if choice is False:  # only an explicit "no" counts as an objection
            declined = ApprovalDeclined(digest=view.record.digest, channel=CHANNEL, by="the user in the client")
            ctx.ledger.add(view.record.subject, declined)
            hold_machine(ctx, job_id, declined.channel, declined.by)
        elif not isinstance(form, NotAsked):  # the client may have answered without showing the form
            ctx.ledger.add(view.record.subject, ApprovalUnanswered(digest=view.record.digest, how=elicited.action))
        return answer(ctx, results.torn_down(view, declined=choice is False))


def question(view: TeardownView) -> str:
    """Return the question to the user.

    It contains the facts' digest, because an approval applies only to these facts.
    """
    lease, record = view.lease, view.record
    dying = f"{counted(len(view.dying), 'file')}, {sum(f.size for f in view.dying):,} bytes, will be deleted"
    copies = f"; verified copies are in {view.copy_at}" if view.copy_at and view.dying else ""
    # Use the cost at the time of the ticket: if the text changed, the user would be asked again.
    price = lease.instance.price_usd_per_hour if lease.instance else None
    cost = None if price is None else price * (record.since - lease.opened_at) / 3600
    return (
        f"{record.verb} {lease.platform} instance {lease.instance_id} of job {view.job.spec.name} ({view.job.id})? "
        f"Its price is {usd_per_hour(price)}, and it had cost about {usd(cost)} at the time of this request. "
        f"{dying}{copies}. "
        f"Ticket {record.id}, facts {(record.digest or '')[7:19]}."
    )
