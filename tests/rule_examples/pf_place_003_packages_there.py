from gpuwarden.core.models import Known, Unknown
from gpuwarden.core.readiness import Readiness, Uv
from rule_kit import OWNED, submit


def there(**given: object) -> object:
    return submit(OWNED, command=("python", "train.py"), readiness=Known(Readiness(**given)))  # type: ignore[arg-type]


FIRES = [
    there(unmet=("torch",)),
    there(unmet=("torch",), uv=Uv.THERE, network=False),
    there(unmet=("torch",), uv=Uv.BROUGHT),  # information
    there(trouble="the header can't be understood"),
    there(no_modules=("torch",)),
    there(unmet=("torch",), uv=Uv.UNUSED, python="3.12", where="in the image python:3.12"),
    there(no_python=True, where="in the image ubuntu"),
    there(no_modules=("torch",), where="on the login node"),  # warning
    submit(OWNED, readiness=Unknown("no answer")),
]
SILENT = [
    submit(),
    submit(OWNED),
    there(),
    there(unmet=("torch",), uv=Uv.THERE),
    there(uv=Uv.BROUGHT),
    there(uv=Uv.UNUSED, where="on the cluster's nodes"),
]
