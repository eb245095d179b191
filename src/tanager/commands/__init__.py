"""The subcommands of `tanager`: one file each, with `run(arguments) -> exit status`.

`arguments` are the words after `tanager COMMAND`.
"""
