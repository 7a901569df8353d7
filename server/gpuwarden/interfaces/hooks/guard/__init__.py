"""A hook for coding agents that blocks calls that bypass gpuwarden.

A client runs `python -m gpuwarden.interfaces.hooks.guard CLIENT CONFIG` before each call, with the call as JSON on
standard input. CLIENT is claude, codex, gemini or cursor. CONFIG is a JSON file that `gpuwarden hooks install` writes.
The file contains the protected paths and the providers' patterns. A hook call therefore does not import the providers
and takes only 0.1 s.

    limits      limits per call, and the parser (tree-sitter-bash)
    printing    a command's predicted output
    words       the value of one word: quotes, variables, simple substitutions
    shell       text -> simple commands, with their input and output
    reach       match a path against protected paths: globs, braces, unknown parts
    writes      the files that a program writes, and their content
    drafts      the files that the call writes, and their content
    state       variables, functions, aliases and the working directory, as commands change them
    nested      the commands that a program runs: after a wrapper, on another machine, or from its arguments
    texts       check the text that programs run: shells, other languages, options and variables
    judge       check each command in a text, and each command that it runs
    programs    requests and code that tear down a machine or delete protected files
    desired     arguments that stop or delete a resource by setting its state, as in a patch or an Ansible module
    files       commands that remove or change gpuwarden's state and policy
    settings    edits of a client's configuration that remove this guard or change a GPUWARDEN variable
    edits       tools that edit or patch a file
    servers     tools from other MCP servers
    calls       one tool call, as a client sends it
    __main__    the hook's process: it answers in the client's format, and blocks the call on any error

The guard can't check script files, encoded or computed commands, or the user's own programs. It does not restrict the
user. It prevents common mistakes; only the permissions of the account's key are a reliable limit.
"""
