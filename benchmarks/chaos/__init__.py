"""Faults on purpose: kills, freezes, full disks, changed bits and cut networks against a supervised run, and a verdict.

`plan` draws them (pure), `look` sees where a job stands, `aim` waits for the moment, `inject` does the harm, `space` is
the disk that gets full, `job` starts the supervisor, `campaign` goes through the plan, `cuts` is a campaign of its own
on two hosts whose link it cuts, `judge` compares what came out with a run that nobody disturbed.
"""
