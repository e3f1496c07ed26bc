"""The processes of a run: how they start, connect, are monitored and end.

Starting and ending: `launch.py` starts the processes of one machine and kills what they leave, `supervise.py` restarts a failed
run and records its progress; `exit_codes.py` lists the exit codes.

Connecting: `process_env.py` reads the environment that a launcher or cluster sets, `rendezvous.py` waits for all processes,
`distributed.py` initialises JAX, `coordination.py` exchanges small values. `lease.py` allows one run at a time to write to a
folder, and `life.py` tells by the lease whether that run still runs. `endings.py` lets processes end together, and tells the others of one that
ends early.

Monitoring and stopping: `watchdog.py` ends a process that is stuck and finds silent ones, `preemption.py` handles SIGTERM and
Ctrl-C. `output.py` prints and writes safely, `host_names.py` checks the names by which a server is asked for.
"""
