"""A hook for coding agents. It blocks calls that bypass gpuwarden.

A client runs `python -m gpuwarden.interfaces.hooks.guard CLIENT CONFIG` before each call, with the call as JSON on
standard input. CLIENT is claude, codex, gemini or cursor. CONFIG is a JSON file that `gpuwarden hooks install` writes.
The file contains the protected paths and the patterns that providers declare, so a hook call does not import providers
and takes only 0.1 s.

    limits      limits per call, and the parser (tree-sitter-bash)
    printing    the predicted output of a command
    words       the value of one word: quotes, variables, simple substitutions
    shell       text -> simple commands, with their input and output
    reach       match a path against protected paths: globs, braces, unknown parts
    writes      the files that a program writes, and their content
    drafts      the files that the call has written so far, and whether it may write them
    judge       the programs that a command runs: wrappers, shells, SSH, other languages; each is unwrapped and checked
    programs    requests and code that tear down a machine or delete protected files
    desired     arguments that stop or delete a resource by setting its state: a patch, an Ansible module
    files       removals and changes of gpuwarden's state and policy
    settings    edits of a client's configuration that remove this guard or change a GPUWARDEN variable
    edits       tools that edit or patch a file
    servers     tools of other MCP servers
    calls       one tool call, as a client sends it
    __main__    the process: answers in the client's format, and blocks the call if anything fails

The guard can't check script files, encoded or computed commands, or the user's own programs. It does not restrict the
user. Only the permissions of the account's key are a real limit; the guard prevents common mistakes.
"""
