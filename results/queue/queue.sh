#!/usr/bin/env bash
# queue.sh PART ...: run parts of results/smollm2 one after the other, in the repository's root. A PART is KIND-N: N rows
# of each dataset, or KIND-all. A run goes on where its records in this folder end; its visits go to runs/KIND, and when
# each part began and ended, with the machine's load, to runs/queue.log, which goes on where queue.log in this folder ends.
set -u
cd "$(dirname "$0")/../.." || exit 1
here=results/queue
mkdir -p runs
[ -f runs/queue.log ] || cp "$here/queue.log" runs/queue.log
qa='dataset=[narrativeqa,qasper,multifieldqa_en,hotpotqa,2wikimqa,musique,trec,triviaqa,samsum,passage_count,passage_retrieval_en,lcc,repobench-p]'
sum='dataset=[gov_report,qmsum,multi_news]'
speeds='[1.2, 1.5, 2, 2.5, 3]'
lead="{name: lazy, speedup: $speeds}, {name: static_pruning, speedup: $speeds}, {name: random_drop, speedup: $speeds}"
kept='{name: lazy, label: lazy_without_revival, speedup: [1.5, 2], revive: false}'
compressed='{name: prompt_compression, keep: [0.2, 0.5, 0.8], unit: sentence}'
field='{name: gemfilter}, {name: fastkv}, {name: claa}, {name: pyramidinfer}, {name: promptdistill}'
measured='{name: asl}, {name: uniprefill}'
pair='arms=[{name: lazy}, {name: static_pruning}]'
every="arms=[{name: lazy}, {name: lazy, label: lazy_without_revival, revive: false}, {name: static_pruning}, {name: random_drop}, $field, $measured]"
uncut=model.max_prompt_tokens=7500
for part in "$@"; do
  kind=${part%-*} rows=${part##*-} size=1
  case $kind in
    table1-*) a=(experiment=table1 arms.3.seeds=1) ;;
    seeds-*) a=(label=table1 'arms=[{name: random_drop, speedup: table1, seeds: 5}]') ;;
    released-*) a=(label=table1 'arms=[{name: prompt_compression, keep: 0.5, unit: sentence, scoring: sentences}]') ;;
    figure5-*) a=(experiment=figure5 "arms=[$lead, $kept]") ;;
    faster-*) a=(label=figure5 'arms=[{name: lazy, speedup: 3.5}]') ;;
    compression-*) a=(label=figure5 "arms=[$compressed]") ;;
    field15-*) a=(experiment=field speedup=1.5x "arms=[$field, $measured]") ;;
    field2-*) a=(experiment=field speedup=2x "arms=[$field]") ;;
    figure6-*) a=(experiment=figure6 max_new_tokens=64) size=18 ;;
    figure7-*) a=(experiment=figure7 trace=1) ;;
    long-*) a=(label=long speedup=1.5x "$pair" "$uncut") ;;
    needle) a=(label=needle speedup=2x "$every" "$uncut") ;;
    ruler_*) a=(label="$kind" speedup=2x "$every" "$uncut" data.length="${kind#*_}") ;;
    *) echo "no such part: $part" >&2; exit 1 ;;
  esac
  mini=(subset=mini data.dir=../shared/minilongbench)
  case $kind in
    *-qa) data=("$qa" "${mini[@]}") ;;
    *-summaries) data=("$sum" "${mini[@]}") ;;
    *-multi) data=('dataset=[hotpotqa,2wikimqa,musique]' "${mini[@]}") ;;
    *-all) data=(dataset=all "${mini[@]}") ;;
    needle) data=(dataset=needle) ;;
    ruler_*) data=('dataset=[niah_single_1,niah_multikey_2,niah_multikey_3,vt,cwe,fwe]' data.dir=../shared/ruler/rows) ;;
    *) echo "no such part: $part" >&2; exit 1 ;;
  esac
  [ "$rows" = all ] && limit=null || limit=$rows
  if [ -d "$here/$kind" ] && [ ! -d "runs/$kind" ]; then
    cp -r "$here/$kind" "runs/$kind" && gunzip "runs/$kind/visits.jsonl.gz"
  fi
  echo "begin $part $(date '+%F %T') load $(cat /proc/loadavg)" >> runs/queue.log
  .venv/bin/python run.py model=smollm2 warmup=1 fidelity=answer batch_size=$size "${a[@]}" "${data[@]}" limit="$limit" \
    out="runs/$kind" >> "runs/$kind.log" 2>&1
  echo "end $part rc=$? $(date '+%F %T') load $(cat /proc/loadavg)" >> runs/queue.log
done
