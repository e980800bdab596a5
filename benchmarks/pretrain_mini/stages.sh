# stages.sh
# The three stages of m3BERT: masked language modelling on English, then on all languages, then contrastive training on
# pairs. Run it again after an interruption: it continues where it stopped.
#
#   bash stages.sh TEXT RUN
#
# TEXT has english/LANGUAGE/*.txt, languages/LANGUAGE/*.txt and pairs/*.jsonl. RUN gets the tokenizer and the models.
#
# Environment variables, none of which is needed: TRAIN starts training, by default `m3bert train`. STAGE1, STAGE2 and
# STAGE3 are further options of the stages. TOKENIZER is used in place of a new one; m3BERT's is
# intfloat/multilingual-e5-base. VOCABULARY is the size of a new one, LENGTH the number of tokens of a row.
set -euo pipefail
text=$1 run=$2 train=${TRAIN:-m3bert train} tokenizer=${TOKENIZER:-$2/tokenizer} length=${LENGTH:-512}

# Byte-pair encoding of UTF-8 bytes: no text in any language has unknown tokens.
if [[ -z ${TOKENIZER:-} && ! -e $tokenizer/tokenizer_config.json ]]; then
    python - "$tokenizer" "${VOCABULARY:-250000}" "$length" "$text"/languages/*/*.txt <<'PYTHON'
import sys
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

folder, size, length, *files = sys.argv[1:]
names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
tokenizer, level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel()
tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizers.NFKC(), level, decoders.ByteLevel()
learned = {"vocab_size": int(size), "special_tokens": [*names.values()], "initial_alphabet": level.alphabet()}
tokenizer.train(files, trainers.BpeTrainer(show_progress=False, **learned))
ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", ends)
PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=int(length), **names).save_pretrained(folder)
PYTHON
fi

m3bert prepare --files "$text/english" --tokenizer_name "$tokenizer" --max_length "$length" --output_dir "$run/english"
m3bert prepare --files "$text/languages" --tokenizer_name "$tokenizer" --max_length "$length" \
    --output_dir "$run/languages"

# A stage is over when its model is there. Until then, `auto` continues from its last checkpoint, if it has one.
[[ -e $run/stage1/model.safetensors ]] || $train multigranular-mlm --config m3bert_stage1 \
    --prepared_data "$run/english" --tokenizer_name "$tokenizer" \
    --output_dir "$run/stage1" --resume_from_checkpoint auto ${STAGE1:-}
[[ -e $run/stage2/model.safetensors ]] || $train multigranular-mlm --config m3bert_stage2 \
    --prepared_data "$run/languages" --model_name_or_path "$run/stage1" \
    --output_dir "$run/stage2" --resume_from_checkpoint auto ${STAGE2:-}
[[ -e $run/stage3/model.safetensors ]] || $train contrastive --config m3bert_stage3 \
    --train_files "$text"/pairs/*.jsonl --model_name_or_path "$run/stage2" \
    --output_dir "$run/stage3" --resume_from_checkpoint auto ${STAGE3:-}
