"""Run Slurm's commands on the Slurm host that this file is sent to. Standard library only, Python >= 3.8.

    python -I -S -c LOADER    reads the agent's source and one JSON object from stdin, prints one JSON object

The agent returns the output of Slurm's commands unchanged, except that job lists are reduced to gpuwarden's jobs and
the required fields, because the lists are long on large clusters. The caller interprets the output. The verbs:

    jobs      the rows of gpuwarden's jobs: one `squeue`, and one `sacct` for the jobs missing from it
    limits    the cluster's limits: configuration, partitions, nodes, associations, and a dry run of a request
    submit    `sbatch`, at most once per name: if the job has already been submitted, it is returned
    array     one `sbatch` for many jobs with separate run folders, at most once per array name
    stop      `scancel`; a running job first gets a signal and a grace period
"""

from __future__ import annotations

import base64
import getpass
import json
import os
import re
import stat
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional, Set, Tuple

QUESTION_S = 40.0
MAX_LIST = 512 << 20
MAX_TABLE = 64 << 20
MAX_NAMES = 2_000  # maximum number of job names in one argument
MAX_ARRAYS = 5  # a job is looked up in at most this many of the newest arrays
MAX_TASKS = 4_000_001  # Slurm's limit for one array
KEPT = (
    "job_id", "name", "comment", "job_state", "state_reason", "partition", "nodes", "restart_cnt", "submit_time",
    "eligible_time", "start_time", "end_time", "time_limit", "exit_code", "tres_alloc_str", "tres_req_str",
    "array_job_id", "array_task_id", "array_task_string", "user_name", "user_id", "current_working_directory",
)  # fmt: skip
SACCT = "JobID,JobName,State,ExitCode,Submit,Start,End,ElapsedRaw,Partition,AllocTRES,NodeList,WorkDir"
END = SACCT.split(",").index("End")
QOS = (
    "Name,MaxWall,MaxTRES,MaxTRESPerNode,MaxTRESPerUser,MaxTRESPerAccount,MaxJobsPerUser,MaxJobsPerAccount,"
    "MaxSubmitJobsPerUser,MaxSubmitJobsPerAccount,GrpJobs,GrpSubmit,GrpTRES,GrpTRESMins,MaxTRESMins,GrpWall"
)
TEXT = "%A|%F|%K|%j|%T|%r|%P|%N|%V|%S|%e|%l|%u|%Z"
TEXT_KEYS = (
    "job_id", "array_job_id", "array_task_id", "name", "job_state", "state_reason", "partition", "nodes", "submit_time",
    "start_time", "end_time", "time_limit", "user_name", "current_working_directory",
)  # fmt: skip
# Variables that Slurm's commands need or that users set for them. Other shell variables are not passed to jobs.
PASSED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TERM", "SLURM_CONF", "SLURM_CLUSTERS")
PASSED_FAMILIES = ("LC_", "SBATCH_", "MODULE", "LMOD_")
# These would turn one job into an array, make `sbatch` wait until the job ends, or submit the job to a cluster that the
# other commands do not query.
NOT_PASSED = ("SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_CLUSTERS")
MORE_PATH = ("/usr/local/bin", "/usr/bin", "/bin", "/opt/slurm/bin", "/usr/local/slurm/bin", "/opt/slurm/current/bin")
NAME = re.compile(r"(gw-.+)-a[1-9][0-9]{0,3}")
"""A job's name in Slurm: the name of its run folder and the attempt."""
Json = Dict[str, Any]


def environment(extra: Json) -> Dict[str, str]:
    """Return the environment for Slurm's commands. Jobs inherit it."""
    kept = {k: v for k, v in os.environ.items() if k in PASSED or k.startswith(PASSED_FAMILIES)}
    env = {**kept, **{str(k): str(v) for k, v in extra.items()}, "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}
    for name in NOT_PASSED:
        env.pop(name, None)
    env["PATH"] = ":".join(dict.fromkeys([p for p in env.get("PATH", "").split(":") if p] + list(MORE_PATH)))
    return env


def run(argv: List[str], env: Json) -> Json:
    """Run one command and return its result; `rc` is None if it could not be run or timed out."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1, env=env, timeout=QUESTION_S)
    except subprocess.TimeoutExpired:
        return {"rc": None, "out": "", "err": "{} did not finish within {:.0f} s".format(argv[0], QUESTION_S)}
    except OSError as error:
        return {"rc": None, "out": "", "err": "{} can't be run: {}".format(argv[0], error.strerror)}
    out = done.stdout[:MAX_LIST].decode("utf-8", "replace")
    return {"rc": done.returncode, "out": out, "err": done.stderr[-2000:].decode("utf-8", "replace")}


def queue(folders: Dict[str, str], env: Json) -> Json:
    """Return the rows for gpuwarden's jobs from one listing of Slurm's queue; `rows` is None if the listing is invalid.

    If Slurm was built without JSON support and rejects `--json`, the list is requested as text.
    """
    done = run(["squeue", "--json", "--me", "--states=all"], env)
    if done["rc"] not in (0, None):
        plain = run(["squeue", "-h", "-r", "--me", "--states=all", "-o", TEXT], env)
        lines = [line.split("|", len(TEXT_KEYS) - 1) for line in plain["out"].split("\n")]
        if plain["rc"] == 0:  # a line with fewer fields is the rest of a job's name
            found = [dict(zip(TEXT_KEYS, fields)) for fields in lines if len(fields) == len(TEXT_KEYS)]
            done = {"rc": 0, "out": json.dumps({"jobs": [spelled(job) for job in found]}), "err": ""}
    try:
        answer = json.loads(done["out"]) if done["rc"] == 0 else None
    except (ValueError, RecursionError):
        answer = None
    jobs = answer.get("jobs") if isinstance(answer, dict) else None
    if answer is None or not isinstance(jobs, list) or answer.get("errors") or not all(map(is_row, jobs)):
        errors = str((answer or {}).get("errors") or "")[:500] if isinstance(answer, dict) else done["out"][:200]
        return {"rows": None, "rc": done["rc"], "err": done["err"].strip() or errors}
    mine, tasks = getpass_user(), tasks_of(folders)
    of_arrays = {}  # type: Dict[str, Set[str]]
    for task in tasks.values():  # a set, because a job's folder may name the array of another job
        of_arrays.setdefault(task["stem"], set()).add(task["folder"])
    own = {stem: {folder} for stem, folder in folders.items()}
    rows = [{key: job.get(key) for key in KEPT} for job in jobs if is_own_job(job, own, mine)]
    shared, arrays = [job for job in jobs if is_own_job(job, of_arrays, mine)], by_array(tasks)
    try:
        rows += [row for job in shared for row in split(job, tasks, arrays)]
    except ValueError as error:
        return {"rows": None, "rc": 0, "err": str(error)}
    return {"rows": rows, "rc": 0, "err": "", "meta": answer.get("meta"), "tasks": tasks}


def tasks_of(folders: Dict[str, str]) -> Dict[str, Json]:
    """Map the names of jobs that are array tasks to their array and index. Other jobs are omitted.

    A file in the job's run folder names the array; the array's folder contains the table of its tasks.
    """
    found, tables = {}, {}  # type: Dict[str, Json], Dict[str, Json]
    for stem, folder in folders.items():
        for name in named_files(stem, folder, ".array")[-MAX_ARRAYS:]:
            array = read_json("{}/{}.array".format(folder, name)) or {}
            there, home = str(array.get("name")), str(array.get("folder"))
            if not NAME.fullmatch(there):
                continue
            table = "{}/{}.table".format(home, there)
            if table not in tables:
                tables[table] = read_json(table, MAX_TABLE) or {}
            index = tables[table].get(name)
            if isinstance(index, int):
                found[name] = {"name": there, "stem": stem_of(there), "folder": home, "index": index, "at": folder}
    return found


def by_array(tasks: Dict[str, Json]) -> Dict[Tuple[str, str], Dict[int, str]]:
    """Return each array's tasks by index. The keys are the arrays' names and folders."""
    found = {}  # type: Dict[Tuple[str, str], Dict[int, str]]
    for name, task in tasks.items():
        found.setdefault((task["name"], task["folder"]), {})[task["index"]] = name
    return found


def split(row: Json, tasks: Dict[str, Json], arrays: Dict[Tuple[str, str], Dict[int, str]]) -> List[Json]:
    """Split an array's row into one row per task. Slurm lists all pending tasks of an array in a single row."""
    number = row.get("array_task_id")
    while isinstance(number, dict):
        number = number.get("number") if number.get("set") is not False else None
    waiting = row.get("array_task_string")
    about = indices(str(waiting)) if waiting else indices(str(number)) if number is not None else set()
    array = row.get("array_job_id")
    while isinstance(array, dict):
        array = array.get("number")
    named, at = str(row.get("name")), str(row.get("current_working_directory") or "")
    found = []
    for name, folder in [(named, at)] if at else arrays:
        members = arrays.get((name, folder), {}) if name == named else {}
        for index in sorted(about & members.keys()):
            task = members[index]
            own = {"name": task, "current_working_directory": tasks[task]["at"], "task": "{}_{}".format(array, index)}
            found.append({**{key: row.get(key) for key in KEPT}, **own})
    return found


def indices(text: str) -> Set[int]:
    """Parse indices such as `7`, `[5-9%2]` or `1,3,8-100:2`. Raises ValueError for another format."""
    found = set()  # type: Set[int]
    for part in text.strip("[]").partition("%")[0].split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", part)
        if match is None:
            raise ValueError("Slurm listed the tasks of an array in an unknown format: " + text[:80])
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if step < 1 or not 0 <= last - first <= MAX_TASKS:
            raise ValueError("Slurm listed invalid task indices of an array: " + text[:80])
        found.update(range(first, last + 1, step))
    return found


def ranges(numbers: List[int]) -> str:
    """Format indices for `--array`, such as `0-3,5`."""
    parts = []  # type: List[List[int]]
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else "{}-{}".format(first, last) for first, last in parts)


def named_files(stem: str, folder: str, suffix: str) -> List[str]:
    """Return the names of a job's attempts that have a file with this suffix in its folder, in order of attempt.

    The job can write to its folder, so other names are ignored.
    """
    try:
        files = os.listdir(folder)
    except OSError:
        return []
    names = [file[: -len(suffix)] for file in files if file.endswith(suffix)]
    return sorted((name for name in names if stem_of(name) == stem), key=lambda name: int(name.rpartition("-a")[2]))


def stem_of(name: object) -> str:
    """Return the part of a job's name that all of its attempts share; "" if gpuwarden never uses such a name."""
    match = NAME.fullmatch(str(name))
    return match[1] if match else ""


def spelled(job: Json) -> Json:
    """Convert a row of Slurm's text output to the JSON format. Unset values are omitted; the limit is in minutes."""
    known = {k: v for k, v in job.items() if v not in ("N/A", "NONE", "(null)")}
    days, _, rest = ("0-" + known.pop("time_limit", "")).rpartition("-")
    parts = [int(p) for p in rest.split(":") if p.isdecimal()]
    days = days.rpartition("-")[2]
    minutes = sum(p * f for p, f in zip(reversed(parts), (1 / 60, 1, 60))) + 1440 * int(days if days.isdecimal() else 0)
    return {**known, **({"time_limit": minutes} if parts else {})}


def is_row(job: Any) -> bool:
    """Return whether an entry of the queue has the fields that identify a job. If not, the format is unknown."""
    return isinstance(job, dict) and isinstance(job.get("name"), str) and job.get("job_id") is not None


def is_own_job(job: Json, folders: Dict[str, Set[str]], mine: str) -> bool:
    """Return whether a row belongs to a job in `folders`: its name, run folder and user (`mine`) must match.

    The name alone is not enough: other users can choose it, and some versions of Slurm list the jobs of all users.
    """
    there = folders.get(stem_of(job.get("name")), set())
    at = job.get("current_working_directory")
    here = not at or (isinstance(at, str) and at in there)
    return bool(there) and here and job.get("user_name") in (mine, None, "")


def getpass_user() -> str:
    """Return the current user's name."""
    try:
        import pwd

        return pwd.getpwuid(os.getuid()).pw_name
    except (ImportError, KeyError):
        return getpass.getuser()


def jobs(request: Json, env: Json) -> Json:
    """Return the queue's rows for gpuwarden's jobs, and the accounting rows for those that have left it.

    `folders` maps the stem of each job name to its run folder, which contains a file for every submitted job.
    """
    folders = request["folders"]
    found = queue(folders, env)
    reply = {"ok": True, "queue": found, "accounting": None, "now": time.time()}
    there = {str(row["name"]).rpartition("-a")[0] for row in found["rows"] or ()}
    tasks = found.pop("tasks", {})
    logs = {name.rpartition("-a")[0]: log_of(task) for name, task in tasks.items()}
    reply["messages"] = {
        stem: script_output_end(folder, logs.get(stem)) for stem, folder in folders.items() if stem in there
    }
    lost = {stem: folder for stem, folder in folders.items() if stem not in there}
    reply["sending"] = [stem for stem, at in lost.items() if is_sending(stem, at, tasks)]
    lacking = {name for stem, folder in lost.items() for name in submitted(stem, folder)}
    lacking |= {task["name"] for name, task in tasks.items() if name.rpartition("-a")[0] in lost}
    if found["rows"] is not None and lacking:
        since = "now-{}days".format(int(request.get("days") or 30))
        named = ["--name=" + ",".join(sorted(lacking))] if len(lacking) <= MAX_NAMES else []
        # By default, root and operators see all users' jobs.
        argv = ["sacct", "-X", "-n", "-P", "--user=" + getpass_user(), "-S", since, *named, "-o", SACCT]
        answer = reply["accounting"] = run(argv, env)
        if answer["rc"] == 0:
            lines = without_runaways(accounted(answer["out"], tasks, lacking), env)
            answer["out"] = "".join(line + "\n" for line in lines)
        if answer["rc"] != 0:  # accounting is either not configured or not running
            config = run(["scontrol", "show", "config"], env)
            answer["kept"] = not (config["rc"] == 0 and "accounting_storage/none" in config["out"])
    return reply


def is_sending(stem: str, folder: str, tasks: Dict[str, Json]) -> bool:
    """Return whether a job is being submitted, on its own or with its array."""
    homes = [task["folder"] for name, task in tasks.items() if name.rpartition("-a")[0] == stem]
    return any(map(submission_in_progress, [folder, *homes]))


def accounted(text: str, tasks: Dict[str, Json], names: Set[str]) -> List[str]:
    """Return the `sacct` lines with these names. A line for an array becomes one line per task in `tasks`."""
    found, arrays = [], by_array(tasks)
    for line in text.split("\n"):
        fields = line.split("|", SACCT.count(","))
        if len(fields) <= SACCT.count(",") or fields[1] not in names:  # a shorter line is the rest of a folder's name
            continue
        job, of_array, index = fields[0].partition("_")
        if not of_array:
            found.append(line)
            continue
        members = arrays.get((fields[1], fields[-1]), {})
        for number in sorted(indices(index) & members.keys()) if members else ():
            name = members[number]
            found.append("|".join(["{}_{}".format(job, number), name, *fields[2:-1], tasks[name]["at"]]))
    return found


def without_runaways(lines: List[str], env: Json) -> List[str]:
    """Omit the `sacct` lines of jobs that have no end time and that the controller does not know.

    Accounting missed the end of these jobs. The controller's list includes hidden partitions, in which `squeue` shows
    no jobs by default. If the controller does not respond, all lines are returned.
    """
    open_jobs = {line.partition("|")[0] for line in lines if line.split("|")[END] == "Unknown"}
    if not open_jobs:
        return lines
    done = run(["squeue", "-h", "-a", "-r", "--me", "--states=all", "-o", "%i"], env)
    runaways = open_jobs - set(done["out"].split()) if done["rc"] == 0 else set()
    return [line for line in lines if line.partition("|")[0] not in runaways]


def log_of(task: Json) -> str:
    """Return the file in which Slurm stores the output of a task's batch script."""
    return "{}/engine.{}.log".format(task["folder"], task["index"])


def script_output_end(folder: str, log: Optional[str] = None) -> str:
    """If a batch script's runner never started, return the end of the script's output, which contains the reason."""
    if os.path.exists(folder + "/status.json"):
        return ""
    try:
        return read_end(log or folder + "/engine.log", 300).decode("utf-8", "replace")
    except OSError:
        return ""


def submitted(stem: str, folder: str) -> List[str]:
    """Return the names under which a job was submitted; the first attempt is always included."""
    return sorted({*named_files(stem, folder, ".submitted"), stem + "-a1"})


def limits(request: Json, env: Json) -> Json:
    """Return the output of Slurm commands that report the cluster's limits, and of a dry run of a request."""
    user = getpass_user()
    asked = {
        "config": ["scontrol", "show", "config"],
        "partitions": ["scontrol", "show", "partition", "-o"],
        "nodes": ["sinfo", "-h", "-o", "%R|%G|%c|%m|%D|%t"],
        "associations": ["sacctmgr", "-n", "-P", "show", "assoc", "user=" + user,
                         "format=Cluster,Account,Partition,QOS,DefaultQOS"],
        "qos": ["sacctmgr", "-n", "-P", "show", "qos", "format=" + QOS],
        "usage": ["scontrol", "-o", "show", "assoc_mgr", "users=" + user, "flags=assoc,qos"],
        "check": ["sbatch", "--test-only", *request["args"], "--wrap", "true"],
    }  # fmt: skip
    answers = {name: run(argv, env) for name, argv in asked.items()}
    return {"ok": True, "user": user, "uid": os.getuid(), **answers}


def submit(request: Json, env: Json) -> Json:
    """Submit a batch script under a name that is unique for this user, or return the existing job with that name.

    For a job in an array, the array's lock is held, so that the job is not submitted twice.
    """
    folder, name = request["folder"], request["name"]
    lock = locked(folder + "/submit.lock")
    try:
        array = read_json(folder + "/" + name + ".array")
        if array is None:
            return submitted_once(request, env)
    finally:
        if lock >= 0:
            os.close(lock)
    lock = locked(str(array.get("folder")) + "/submit.lock")
    try:
        return submitted_once(request, env)
    finally:
        if lock >= 0:
            os.close(lock)


def submitted_once(request: Json, env: Json) -> Json:
    """Submit a batch script unless its job has already been submitted, on its own or as an array task."""
    folder, name = request["folder"], request["name"]
    stem = name.rpartition("-a")[0]
    known = read_json(folder + "/" + name + ".submitted")
    task = tasks_of({stem: folder}).get(name)
    if known is None and task is not None:
        known = read_json("{}/{}.submitted".format(task["folder"], task["name"]))
    if known is not None:
        return {"ok": True, "id": known.get("id"), "adopted": True}
    found = queue({stem: folder}, env)
    if found["rows"] is None:
        return {"ok": False, "code": "unreachable", "error": found["err"]}
    there = [row for row in found["rows"] if row["name"] == name]
    if there:
        return {"ok": True, "id": there[0]["job_id"], "adopted": True}
    return sbatch(request, env, folder, name)


def array(request: Json, env: Json) -> Json:
    """Submit many jobs as one array, at most once per name. A job that has been submitted separately is omitted.

    The array's name is first written to each run folder, so that a later `submit` for one of the jobs checks the array.
    """
    folder, name, tasks = request["folder"], request["name"], request["tasks"]
    lock = locked(folder + "/submit.lock")
    try:
        if read_json(folder + "/" + name + ".submitted") is not None:
            return {"ok": True, "adopted": True}
        config = run(["scontrol", "show", "config"], env)
        most = re.search(r"^MaxArraySize\s*=\s*(\d+)", config["out"], re.MULTILINE)
        if config["rc"] != 0 or most is None:
            error = config["err"].strip() or "its configuration has no MaxArraySize"
            return {"ok": False, "code": "unreachable", "error": error}
        if len(tasks) > int(most[1]):
            error = "the array has {} tasks, but MaxArraySize is {}".format(len(tasks), most[1])
            return {"ok": False, "code": "refused", "error": error}
        left = [task for task in tasks if pointed(task, folder, name, request["files"])]
        stems = {task["name"].rpartition("-a")[0]: task["folder"] for task in left}
        found = queue({**stems, name.rpartition("-a")[0]: folder}, env)
        if found["rows"] is None:
            return {"ok": False, "code": "unreachable", "error": found["err"]}
        there = {row["name"]: row for row in found["rows"]}
        if name in there:
            write(folder + "/" + name + ".submitted", json.dumps({"id": there[name].get("array_job_id")}))
            return {"ok": True, "adopted": True}
        for task in left:
            if task["name"] in there:
                os.unlink(task["folder"] + "/" + task["name"] + ".array")
        left = [task for task in left if task["name"] not in there]
        if not left:
            return {"ok": True, "adopted": True}
        write(folder + "/" + name + ".table", json.dumps({task["name"]: task["index"] for task in left}))
        bound = "--array={}%{}".format(ranges([task["index"] for task in left]), int(request["at_once"]))
        secrets = {"GPUWARDEN_ORDER_{}".format(task["index"]): json.dumps(task["secrets"]) for task in left}
        return sbatch({**request, "args": [bound, *request["args"]]}, {**env, **secrets}, folder, name)
    finally:
        if lock >= 0:
            os.close(lock)


def pointed(task: Json, folder: str, name: str, files: Json) -> bool:
    """Write a task's files and array name to the run folder. Return False if the job has been submitted separately."""
    os.makedirs(task["folder"], mode=0o700, exist_ok=True)
    lock = locked(task["folder"] + "/submit.lock")
    try:
        if os.path.exists("{}/{}.submitted".format(task["folder"], task["name"])):
            return False
        for file, content in task["files"].items():
            put(task["folder"] + "/" + file, base64.b64decode(files[content]))
        array = json.dumps({"folder": folder, "name": name}).encode()
        put("{}/{}.array".format(task["folder"], task["name"]), array)
        return True
    finally:
        if lock >= 0:
            os.close(lock)


def sbatch(request: Json, env: Json, folder: str, name: str) -> Json:
    """Run `sbatch`. After a failure, check the queue and do a dry run, to distinguish a refusal from a lost reply."""
    script = folder + "/" + name + ".sh"
    write(script, request["script"])
    given = {**env, "GPUWARDEN_ORDER": json.dumps(request.get("secrets") or {})}
    done = run(["sbatch", "--parsable", "--export=ALL", *request["args"], script], given)
    number = done["out"].strip().partition(";")[0]
    if done["rc"] == 0 and number.isdigit():
        try:
            write(folder + "/" + name + ".submitted", json.dumps({"id": int(number)}))
        except OSError:  # the job was submitted, and can be found by its name
            pass
        return {"ok": True, "id": int(number), "adopted": False}
    found = queue({name.rpartition("-a")[0]: folder}, env)
    there = [row for row in found["rows"] or () if row["name"] == name]
    if there:
        return {"ok": True, "id": there[0]["job_id"], "adopted": True}
    check = run(["sbatch", "--test-only", *request["args"], script], given)
    refused = found["rows"] is not None and done["rc"] not in (None, 0) and check["rc"] not in (None, 0)
    error = (done["err"] or done["out"]).strip()
    return {"ok": False, "code": "refused" if refused else "unreachable", "error": error or "sbatch returned no job id"}


def stop(request: Json, env: Json) -> Json:
    """Stop a job. A pending job is canceled immediately; a running job is sent a signal and canceled after its grace
    period.
    """
    name, folder, grace = request["name"], request["folder"], float(request["grace_s"])
    end = time.monotonic() + float(request["wait_s"])
    asked_at = None  # type: Optional[float]
    while True:
        found = queue({name: folder}, env)
        if found["rows"] is None:
            return {"ok": False, "code": "unreachable", "error": found["err"]}
        # A job in one of the `ended` states will not run again unless it is resubmitted.
        live = [row for row in found["rows"] if state_of(row) not in request["ended"]]
        if not found["rows"] and is_sending(name, folder, found["tasks"]):
            pass  # the job may start after this call
        elif not live:
            record_unstarted(request, found)
            return {"ok": True, "result": "gone" if asked_at is None else "stopped"}
        elif asked_at is None:
            asked_at = stop_requested_at(folder, grace)
            for row in live:
                soft = handles_signals(row, folder) and time.time() - asked_at <= grace
                number = number_of(row)
                run(["scancel", "--batch", "--signal=TERM", number] if soft else ["scancel", number], env)
        elif time.time() - asked_at > grace:
            for row in live:
                run(["scancel", number_of(row)], env)
        if time.monotonic() >= end:
            return {"ok": True, "result": "pending"}
        time.sleep(0.3)


def stop_requested_at(folder: str, grace: float) -> float:
    """Return the time of the first stop request. If this request is the first, record the current time.

    An invalid or future time is ignored, because the job may have written the file, or the clock may have been set
    back. If the file can't be written, no grace period applies.
    """
    now = time.time()
    earlier = (read_json(folder + "/stop.json") or {}).get("asked_at")
    if isinstance(earlier, (int, float)) and 0 < earlier <= now:
        return float(earlier)
    if os.path.isdir(folder):
        try:
            write(folder + "/stop.json", json.dumps({"grace_s": grace, "asked_at": now}))
        except OSError:
            return 0.0
    return now


def number_of(row: Json) -> str:
    """Return an id that refers to this job only. For an array's last task, `job_id` is also the array's id."""
    return str(row.get("task") or row["job_id"])


def record_unstarted(request: Json, found: Json) -> None:
    """Write the final status of a job that was stopped before it ran. Slurm has no record of a task that never ran."""
    name, folder = request["name"], request["folder"]
    attempt = max(int(n.rpartition("-a")[2]) for n in [*submitted(name, folder), *found["tasks"]])
    if read_json(folder + "/stop.json") is None or read_json(folder + "/status.json") is not None:
        return
    word = {"state": "canceled", "reason": "stopped", "token": request["token"], "attempt": attempt,
            "requeues": 0, "ended_at": time.time()}  # fmt: skip
    try:
        write(folder + "/status.json", json.dumps(word))
    except OSError:  # the job has ended anyway
        pass


def handles_signals(row: Json, folder: str) -> bool:
    """Return whether a job's runner can handle a signal: it must have written a status during this run of the job."""
    status = read_json(folder + "/status.json") or {}
    count = row.get("restart_cnt")
    here = status.get("engine_id") == number_of(row) and count in (status.get("requeues"), None)
    return here and status.get("state") == "running" and state_of(row) == "RUNNING"


def state_of(row: Json) -> str:
    """Return a row's state, which newer versions of Slurm write as a list."""
    state = row.get("job_state")
    while isinstance(state, dict):
        state = state.get("current")
    return str(state[0] if isinstance(state, list) and state else state)


def locked(path: str) -> int:
    """Wait for a lock and return its descriptor; -1 if the file system does not support locks.

    Raises OSError if another process holds the lock for more than 20 s.
    """
    import fcntl

    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    for _ in range(200):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            time.sleep(0.1)
        except OSError:
            break
    else:
        os.close(fd)
        raise OSError(11, "another submission of this job holds the lock", path)
    os.close(fd)
    return -1


def submission_in_progress(folder: str) -> bool:
    """Return whether a submission for this run folder is in progress, possibly one whose caller has exited."""
    import fcntl

    try:
        fd = os.open(folder + "/submit.lock", os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def write(path: str, text: str) -> None:
    """Write a private file atomically."""
    put(path, text.encode())


def put(path: str, content: bytes) -> None:
    """Write a private file atomically, unless it already has this content."""
    try:
        if read_end(path, len(content) + 1) == content:
            return
    except OSError:
        pass
    part = "{}.{}.tmp".format(path, os.getpid())
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.rename(part, path)


def read_json(path: str, most: int = 65_536) -> Optional[Json]:
    """Return the JSON object in a small file; None if the file can't be read or contains anything else."""
    try:
        found = json.loads(read_end(path, most))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_end(path: str, most: int) -> bytes:
    """Return the last bytes of a regular file. Other types are rejected, because a job can replace a file with a pipe
    that blocks.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        there = os.fstat(fd)
        if not stat.S_ISREG(there.st_mode):
            raise OSError(22, "not a regular file", path)
        file.seek(max(0, there.st_size - most))
        return file.read(most)


VERBS = {"jobs": jobs, "limits": limits, "submit": submit, "array": array, "stop": stop}


def main() -> None:
    """Carry out the request from stdin, and print the reply."""
    request = json.loads(sys.stdin.buffer.read() or b"{}")
    try:
        reply = VERBS[request["verb"]](request, environment(request.get("env") or {}))
    except OSError as error:
        reply = {"ok": False, "code": "io_error", "error": "{}: {}".format(error.strerror, error.filename)}
    sys.stdout.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
