"""Rules, each for one kind of script; `hvdtrain.commands.migrate.plan` asks them in its order.

A rule is a module, or an entry of `torch.TORCH_RULES`, with ``TITLE``, ``TARGETS`` (the first is auto's),
``recognise(scan) -> bool`` and ``plan(scan, options) -> Rewrite``.
"""
