"""A hook for coding agents: stop calls that go around gpuwarden.

A client runs `python -m gpuwarden.interfaces.hooks.guard CLIENT CONFIG` before each call, with the call as JSON on
standard input. CLIENT is claude, codex or cursor. CONFIG is a JSON file that `gpuwarden hooks install` writes: what is
protected, and the patterns that providers declare. So a call imports no provider, and needs 0.1 s.

    limits      how much is read, and the parser (tree-sitter-bash)
    printing    what a command prints, as far as it is known before it runs
    words       what one word says: quotes, variables, plain substitutions
    shell       text -> simple commands, with what they are fed and where their output goes
    reach       may a path that is written down be one that is kept: globs, braces, unknown parts
    writes      which files a program writes, and what it writes there
    drafts      what the call wrote so far, and may it
    judge       what a command runs: wrappers, shells, SSH, other languages; each is unfolded and judged again
    programs    does it end a machine, delete what is kept, or ask a platform's interface to
    desired     does a program's argument set a state in which something is ended: a patch, a module's state
    files       does it remove or change what gpuwarden decides by
    settings    does an edit of a client's configuration drop this guard or change a GPUWARDEN variable
    edits       a tool that edits or patches a file
    servers     a tool of another MCP server
    calls       one call of a tool, as a client sends it
    __main__    the process: answers in the client's form, and refuses when anything fails

It can't stop what it can't read: a script file that is run, an encoded or computed command, a program of one's own,
a person. The account's key decides what is possible; this stops the usual slips.
"""
