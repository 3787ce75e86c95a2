"""What would stop or slow a run on these hosts, found before the run.

``facts`` looks, ``checks`` judges (pure), ``table`` shows; ``gather`` brings the hosts' facts together under a launcher
and ``start`` starts one rank per host. Changes nothing on a host: every remedy is a command that the user runs.
"""
