"""A run and its processes.

How they start and end: `launch.py` starts those of one machine, `supervise.py` starts a failed run again, `orphans.py` ends
them with their launcher; `exit_codes.py` says how a run ended, `progress.py` how far it came.

How they find one another and agree: `process_env.py` reads what a cluster says, `rendezvous.py` with `attendance.py` waits
until all are there, `distributed.py` joins them, `coordination.py` exchanges small values. `lease.py` with `owner.py` lets one
run at a time write to a folder.

How they are watched and stopped: `watchdog.py` ends what is stuck, `pulse.py` tells who is silent, `preemption.py` takes
SIGTERM and Ctrl-C. `printable.py` escapes what a terminal must not be shown.
"""
