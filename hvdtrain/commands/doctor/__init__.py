"""``python -m hvdtrain doctor``: set-up problems of hosts and the commands that fix them. Changes nothing on a host.

``facts`` looks, ``checks`` judges (pure), ``gather`` collects the facts of all hosts under a launcher, ``cli`` prints.
"""
