"""The processes of a run: how they start, connect, are monitored and end.

Starting and ending: `program.py` finds the program on a command line, `launch.py` starts the processes of one machine and kills
what they leave, `chatter.py` leaves out what Gloo prints, `supervise.py` restarts a failed run and records its progress;
`endings.py` lets processes end together and tells the others of one that ends early; `exit_codes.py` lists the exit codes,
`uncaught.py` has those of a script's errors, `interrupt.py` ends a command by Ctrl-C.

Connecting: `process_env.py` reads the environment that a launcher or cluster sets, `rendezvous.py` waits for all processes,
`distributed.py` initialises JAX, `coordination.py` exchanges small values, `meetings.py` waits for all in what each must call,
`place.py` has how far this process is. `lease.py` allows one run at a time to write to a
folder, and `life.py` tells by the lease whether that run still runs.

Monitoring and stopping: `watchdog.py` ends a process that is stuck and finds silent ones, `preemption.py` handles SIGTERM and
Ctrl-C. `output.py` prints and writes safely.

Serving: `page_server.py` serves pages of a run, `connections.py` limits the connections of a server, `host_names.py` checks the
names by which it is asked for.
"""
