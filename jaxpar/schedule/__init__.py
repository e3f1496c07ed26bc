"""Pipeline schedules as plain data: the named ones, the check that any table must pass. Imports no JAX."""

from jaxpar.schedule.orders import FORMS, SCHEDULES, make_schedule
from jaxpar.schedule.table import KINDS, PLACEMENTS, Op, Schedule

__all__ = ["FORMS", "KINDS", "PLACEMENTS", "SCHEDULES", "Op", "Schedule", "make_schedule"]
