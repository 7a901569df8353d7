"""Record the errors that a script catches and ignores, because their effects would otherwise go unnoticed.

Only handlers that catch all exceptions are watched, and only if they contain nothing but calls, for example to print,
log or exit. A caught error is the script's fault if the code is wrong, or if the failed code was supposed to save
something.
"""

from __future__ import annotations

import ast
import sys
from typing import Callable, Dict

from gpuwarden.remote.first_step.child.record import Enough, Record, Stopped

SAVING = frozenset(
    """save save_pretrained save_model save_state save_file savez push_to_hub upload_folder upload_file save_weights
    save_checkpoint dump to_csv to_json save_to_disk savefig write write_text write_bytes
    save_lora_weights""".split()  # noqa: SIM905
)
Judge = Callable[[BaseException], bool]
CAUGHT, SAVED_NOTHING = "__rehearsal_caught__", "__rehearsal_saved_nothing__"


def watch(tree: ast.Module) -> ast.Module:
    """Return the script with a call inserted at the start of each watched handler."""
    watched: ast.Module = ast.fix_missing_locations(_Watched().visit(tree))
    return watched


def watchers(record: Record, wrong: Judge, blamed: Judge) -> Dict[str, Callable[[], None]]:
    """Return the functions that a watched script calls.

    `wrong` returns whether an error shows that the script's code is wrong. `blamed` returns whether only the script can
    have caused the error.
    """

    def noting(counts: Judge) -> Callable[[], None]:
        def note() -> None:
            error = sys.exc_info()[1]
            if isinstance(error, (Stopped, Enough)):
                raise error  # the script's handler must not catch these
            if record.caught is None and isinstance(error, Exception) and counts(error):
                record.caught = error

        return note

    return {CAUGHT: noting(wrong), SAVED_NOTHING: noting(blamed)}


def saves(tree: ast.AST) -> bool:
    """Return whether a script contains a call that may save files."""
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any((f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "")) in SAVING for f in calls)


class _Watched(ast.NodeTransformer):
    def visit_Try(self, node: ast.Try) -> ast.AST:
        self.generic_visit(node)
        for handler in node.handlers:
            name = getattr(handler.type, "id", "") if handler.type else "BaseException"
            only_calls = all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) for s in handler.body)
            if name in {"Exception", "BaseException"} and only_calls:
                called = SAVED_NOTHING if any(map(saves, node.body)) else CAUGHT
                call = ast.Expr(ast.Call(ast.Name(called, ast.Load()), [], []))
                handler.body = [ast.copy_location(call, handler), *handler.body]
        return node
