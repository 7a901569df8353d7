from dataclasses import replace

from rule_kit import script, submit

TEXT = "import mynet\n"
FIRES = [replace(script(TEXT), local_modules=(("mynet", "mynet.py"),))]
SILENT = [submit(), script(TEXT)]
