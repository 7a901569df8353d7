from rule_kit import script, submit


def header(*requirements: str) -> str:
    listed = ", ".join(f'"{r}"' for r in requirements)
    return f"# /// script\n# dependencies = [{listed}]\n# ///\nimport trl\n"


FIRES = [
    script(header("trl==1.16.0", "transformers==4.46.3")),
    script(header("trl>=1.16", "transformers<4.50")),
    script(header("sentence-transformers==6.2.0", "transformers==4.51.2")),
]
SILENT = [
    submit(),
    script(header("trl==1.16.0", "transformers>=5")),
    script(header("trl==1.16.0", "transformers")),
    script(header("trl>=0.7", "transformers==4.46.3")),
    script(header("trl==99", "transformers==4.46.3")),
    script(header("trl @ git+https://example.org/trl", "transformers==4.46.3")),
    script(header("trl==1.16.0", "torch==2.2.2")),
]
