#!/usr/bin/env bash
# Slurm with one node on this machine, for tests: Debian's packages, root, no systemd, loopback only.
#
#   scripts/dev/slurm_single_node.sh install          the packages, with apt-get; their services are not started
#   scripts/dev/slurm_single_node.sh start FOLDER     start it; FOLDER keeps configuration, state, logs and process ids
#   scripts/dev/slurm_single_node.sh status FOLDER    exit status 0 if the node takes jobs
#   scripts/dev/slurm_single_node.sh stop FOLDER      end it, and take back what was changed in /etc/hosts
#
# While it runs, commands need SLURM_CONF=FOLDER/slurm.conf, and FOLDER/bin first in PATH: there is no accounting here,
# and FOLDER/bin/sacct answers from scontrol, so that submitit notices a job that died.
set -euo pipefail

WAIT_S=60  # for a daemon to come up or to end

fail() { echo "slurm_single_node.sh: $*" >&2; exit 1; }
pid_in() { cat "$state/$1.pid" 2>/dev/null; }
runs() { [ -n "$1" ] && grep -qs '^State:[[:space:]]*[^ZX]' "/proc/$1/status"; } # a zombie, not waited for, does not
gone() { ! runs "$1"; }
alive() { runs "$(pid_in "$1")"; }

wait_for() { # what, command...
  local what=$1 tries=$((WAIT_S * 5))
  shift
  until "$@"; do
    ((tries -= 1)) || { tail -n 20 "$state"/*.log >&2; fail "$what: not within $WAIT_S s; the logs in $state are above"; }
    sleep 0.2
  done
}

install_packages() {
  local policy=/usr/sbin/policy-rc.d ours=
  [ -e "$policy" ] || { ours=1; printf '#!/bin/sh\nexit 101\n' >"$policy"; chmod 755 "$policy"; } # 101: start nothing
  apt-get -o Acquire::Retries=3 update -qq
  DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=3 install -y -qq --no-install-recommends \
    slurmctld slurmd slurm-client munge
  [ -z "$ours" ] || rm "$policy"
}

write_configuration() {
  local cores memory
  cores=$(nproc)
  memory=$(awk '/^MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)
  cat >"$state/slurm.conf" <<CONF
ClusterName=lazyllm
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=6817
SlurmdPort=6818
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$state/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MinJobAge=86400
KillWait=5
StateSaveLocation=$state/spool/ctld
SlurmdSpoolDir=$state/spool/d
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/slurmd.log
NodeName=$(hostname) NodeAddr=127.0.0.1 CPUs=$cores RealMemory=$memory
PartitionName=debug Nodes=ALL Default=YES
CONF
  mkdir -p "$state/spool/ctld" "$state/spool/d" "$state/bin"
  # as much of sacct as submitit asks for (sacct -o JobID,State,NodeList --parsable2 -j ID ...)
  cat >"$state/bin/sacct" <<'SACCT'
#!/usr/bin/env bash
echo 'JobID|State|NodeList'
while [ $# -gt 0 ]; do
  if [ "$1" = -j ]; then
    scontrol --oneliner show job "$2" | sed -nE '
      s/^JobId=[0-9]+ ArrayJobId=([0-9]+) ArrayTaskId=([0-9]+) .*JobState=([A-Z_]+).*/\1_\2|\3|/p
      t
      s/^JobId=([0-9]+) .*JobState=([A-Z_]+).*/\1|\2|/p'
    shift
  fi
  shift
done
SACCT
  chmod 755 "$state/bin/sacct"
}

name_on_loopback() { # slurmd looks its own name up
  getent ahostsv4 "$(hostname)" | grep -q '^127\.' && return
  cp -p /etc/hosts "$state/hosts.before"
  echo "127.0.0.1 $(hostname)" >>/etc/hosts
}

start() {
  [ "$(id -u)" = 0 ] || fail "start needs root"
  command -v slurmctld slurmd munged sbatch >/dev/null || fail "Slurm is not installed: $0 install"
  ! alive slurmctld || fail "$state: runs already; $0 stop $state"
  mkdir -p "$state"
  chmod 755 "$state"
  write_configuration
  name_on_loopback
  head -c 128 /dev/urandom >"$state/munge.key"
  chmod 600 "$state/munge.key"
  munged --socket="$state/munge.socket" --key-file="$state/munge.key" --pid-file="$state/munged.pid" \
    --log-file="$state/munged.log" --seed-file="$state/munge.seed" --force
  wait_for munged munge --socket="$state/munge.socket" --no-input --output=/dev/null
  export SLURM_CONF=$state/slurm.conf
  slurmctld
  wait_for slurmctld alive slurmctld
  slurmd
  wait_for slurmd alive slurmd
  wait_for "an idle node" takes_jobs
  echo "export SLURM_CONF=$state/slurm.conf PATH=$state/bin:\$PATH"
}

takes_jobs() {
  SLURM_CONF=$state/slurm.conf sinfo --noheader --format=%t 2>/dev/null | grep -qE '^(idle|mix|alloc)$'
}

no_jobs() { [ -z "$(squeue --noheader)" ]; }

stop() {
  local daemon pid
  export SLURM_CONF=$state/slurm.conf
  if alive slurmctld && alive slurmd; then # jobs would outlive the daemons, and keep slurmd
    scancel --user=root
    wait_for "the jobs' end" no_jobs
  fi
  for daemon in slurmd slurmctld munged; do
    pid=$(pid_in "$daemon") || continue
    runs "$pid" || continue
    kill "$pid"
    wait_for "$daemon's end" gone "$pid" # its pid file goes before it does
  done
  if [ -e "$state/hosts.before" ]; then
    cat "$state/hosts.before" >/etc/hosts # not moved: in containers /etc/hosts is a mount of its own
    rm "$state/hosts.before"
  fi
}

status() {
  takes_jobs || { echo "$state: no node takes jobs"; return 1; }
  SLURM_CONF=$state/slurm.conf sinfo
}

usage() { sed -n '2,/^set/{/^#/p}' "$0" >&2; exit 2; }

case "${1-}" in
  install) [ $# = 1 ] || usage ;;
  start | stop | status) [ $# = 2 ] || usage; state=$(realpath --canonicalize-missing "$2") ;;
  *) usage ;;
esac
case "$1" in install) install_packages ;; *) "$1" ;; esac
