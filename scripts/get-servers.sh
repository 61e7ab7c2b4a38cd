#!/usr/bin/env bash
# Puts the real servers that tests talk to into a directory; unpacked from Debian's packages, none is installed.
#   current/usr/bin: Prometheus 3, promtool, Alertmanager, amtool, VictoriaMetrics    stable/usr/bin: the same of Prometheus 2.42
#   current/usr/libexec/docker/cli-plugins/docker-compose, which checks Compose files without an engine
# Usage: scripts/get-servers.sh [DIRECTORY]    (default: .servers in the repository; what is there already is kept)
# CURRENT_SUITE and STABLE_SUITE name the Debian suites to take them from.
set -euo pipefail

fail() { echo "get-servers: $*" >&2; exit 1; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=${1:-$root/.servers}
for tool in apt-get dpkg-deb; do command -v "$tool" >/dev/null || fail "$tool is missing: this needs Debian, or a container of it"; done
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r "$keyring" ] || fail "$keyring is missing: install debian-archive-keyring"
mkdir -p "$target" 2>/dev/null || fail "cannot write to $target"
target=$(cd "$target" && pwd)
scratch=$(mktemp -d "$target/unpacking.XXXXXX")
trap 'rm -rf "$scratch"' EXIT

# where this machine's own packages come from
archive=$(apt-get indextargets --format '$(REPO_URI)' 2>/dev/null | grep -E '/debian/?$' | head -n 1 || true)

complete() {                     # complete NAME PROGRAM...: is each program of target/NAME there?
    local name=$1 program; shift
    for program; do [ -x "$target/$name/usr/bin/$program" ] || return 1; done
}

unpack() {                       # unpack NAME SUITE PACKAGE...: all of them or nothing in target/NAME
    local name=$1 suite=$2 apt; shift 2
    [ -n "$archive" ] || fail "no Debian archive among this machine's package sources"
    mkdir -p "$scratch/$name/lists/partial" "$scratch/$name/cache/archives/partial" "$scratch/$name/debs" "$scratch/$name/out"
    echo "deb [signed-by=$keyring] $archive $suite main" >"$scratch/$name/sources.list"
    apt=(apt-get -qq -o "Dir::Etc::SourceList=$scratch/$name/sources.list" -o "Dir::Etc::SourceParts=-" -o "Dir::Cache=$scratch/$name/cache"
         -o "Dir::State::Lists=$scratch/$name/lists" -o "APT::Sandbox::User=$(id -un)")
    "${apt[@]}" update >&2 || fail "cannot read the package lists of $suite"
    (cd "$scratch/$name/debs" && "${apt[@]}" download "$@" >&2) || fail "cannot download $* from $suite"
    for package in "$scratch/$name"/debs/*.deb; do dpkg-deb --extract "$package" "$scratch/$name/out"; done
    rm -rf "${target:?}/$name"
    mv "$scratch/$name/out" "$target/$name"
}

compose=../libexec/docker/cli-plugins/docker-compose
new=(prometheus promtool prometheus-alertmanager amtool victoria-metrics "$compose")
old=(prometheus promtool prometheus-alertmanager amtool)
complete current "${new[@]}" || unpack current "${CURRENT_SUITE:-sid}" prometheus promtool prometheus-alertmanager victoria-metrics docker-compose
complete stable "${old[@]}" || unpack stable "${STABLE_SUITE:-bookworm}" prometheus prometheus-alertmanager
complete current "${new[@]}" && complete stable "${old[@]}" || fail "the packages lack a program that was expected under $target"

# Debian's Alertmanager looks for its templates at a fixed place
templates=/usr/share/prometheus/alertmanager
if [ ! -e "$templates/default.tmpl" ]; then
    { mkdir -p "$templates" && cp -r "$target/current$templates/." "$templates/"; } 2>/dev/null ||
        echo "get-servers: Alertmanager will not start before $target/current$templates is copied to $templates (as root)" >&2
fi

for program in "${new[@]/#/current/usr/bin/}" "${old[@]/#/stable/usr/bin/}"; do
    version=$("$target/$program" --version 2>&1 | grep -oE '[0-9]+\.[0-9]+\.[0-9]+' | head -n 1 || true)
    echo "${program##*/} ${version:-unknown} $target/$program"
done
