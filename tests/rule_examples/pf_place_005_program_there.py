from gpuwarden.core.models import Known
from gpuwarden.core.readiness import Readiness
from rule_kit import OWNED, submit


def there(**given: object) -> object:
    command = ("torchrun", "/data/train.py", "--config", "/data/sft.yaml")
    return submit(OWNED, command=command, readiness=Known(Readiness(**given)))  # type: ignore[arg-type]


FIRES = [
    there(no_program=True),
    there(no_files=("/data/train.py",)),
    there(no_files=("/data/sft.yaml",)),
    there(no_program=True, where="on the login node"),
]
SILENT = [submit(), there()]
