"""Any model of Hugging Face's `transformers`, of a kind that kinds.py lists."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from app.data.loader import tensors
from app.errors import UserError, nearest
from app.models.prediction import Preprocessor
from app.tasks.base import Batch, EvaluationLog
from app.tasks.huggingface import balance, plan
from app.tasks.huggingface import lora as lora_options
from app.tasks.huggingface.kind import PACKED, UNPADDED, Kind, Settings
from app.tasks.huggingface.kinds import KINDS, choose, takers
from app.tasks.huggingface.model import (
    Recipe,
    find_model,
    is_part,
    meta_model,
    position_limits,
    resolve_config,
    takes_registered_attention,
    unmasked_attention,
    with_fused_attention,
)
from app.tasks.huggingface.tokenizer import accepted, choose_tokenizer
from app.tasks.parts import SplitDataTask, one_of, whole_number
from strategies.context.apply import ContextPlan
from strategies.mixtures import find_mixtures

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

GENERATION = "generation_config.json"


class HuggingFace(SplitDataTask):
    """A model of `transformers` by its configuration, on the data of its kind.

    What the data decides (the vocabulary's size, the number of classes, the padding token) is set
    in the configuration unless written there. Trained weights are float32.

    Args:
        model: A model type (`llama`, `gpt2`, `qwen2`, `bert`, `vit`, …), a folder with a
            config.json, or an id on the hub (looked for on this machine first).
        config: Keys of the model's configuration to set, such as hidden_size or num_hidden_layers.
        kind: A name below, or `auto`: what the configuration says the model was, else
            sequence_classification for encoders and causal_lm for decoders. masked_lm must be
            written, since people mostly begin from such models to train others.
        pretrained: Begin from the weights in the folder (or on the hub) instead of new ones. A
            classifier gets a new head, and so does a model that answers from contexts.
        lora: Leave those weights as they are and train adapters beside them (lora.py): a mapping of
            r (default 16), alpha (default 2·r), dropout (default 0), targets (`auto`: every linear
            layer but the last, or names of layers), use_rslora, use_dora, and quantize: `nf4` or
            `int8` keeps the layers with adapters in 4 or 8 bits, and with `quantize_layers: all`
            the other linear layers but the last too (quantized.py).
        freeze: Parts of the model that stay as they are, by name, such as [vision_tower].
        attention: `sdpa`, `eager`, `flash_attention_2`, … (default: the library's choice).
        eval_samples: How many samples are held out.
        data, tokenizer, token_dtype, sequence_length, text, label, mask_fraction, stride,
            image_size, augment_shift, dpo: As the kind has them, below.

    Kinds:
        causal_lm: data, token_dtype and sequence_length (default 256) as for language_modelling;
            tokenizer: `bytes` or a tokenizers file (default: the folder's own tokenizer.json, else
            bytes).
        instructions: data: files of JSON lines with `messages`, or `python`, the docstrings of
            Python's own library; the loss is over the assistant's messages. tokenizer as above; its
            chat template, or ChatML if it has none. sequence_length (default 512): tokens of a row,
            which holds several conversations, each attending to itself.
        preferences: data: files of JSON lines with `prompt`, `chosen` and `rejected`, each a text
            or a list of messages (without `prompt` it is what both answers begin with). tokenizer
            as for instructions; sequence_length (default 1024): tokens of a prompt and an answer
            that are used. dpo: a mapping of beta (default 0.1), label_smoothing (default 0) and
            loss_type (`sigmoid`, `hinge` or `ipo`; preferences.py).
        seq2seq_lm (T5, BART): data: a .csv or .parquet file with columns `text` and `target`
            (others: task_args.text and task_args.label); tokenizer as above; sequence_length:
            tokens of either that are used (default: 512).
        sequence_classification: data: a .csv or .parquet file with columns `text` and `label`;
            tokenizer as above; sequence_length: tokens of a text that are used (default: 512, or
            what the model can).
        masked_lm (BERT, ModernBERT): data and token_dtype as for causal_lm; sequence_length
            (default 512), marks such as [CLS] among them; mask_fraction (default 0.15): how many
            tokens are hidden. Evaluations show the accuracy of hidden tokens.
        token_classification: data: files of JSON lines such as {"tokens": ["Ada", "sleeps"],
            "labels": ["B-PER", "O"]} (other keys: task_args.text and task_args.label; labels may be
            numbers), or in CoNLL's form: a word and its label on each line, and a blank line after
            a sentence. Evaluations show the accuracy of words, and for labels B-X, I-X and O the
            precision, recall and F1 of entities.
        question_answering: data: files of JSON lines such as {"question": "Who sleeps?",
            "context": "Ada sleeps.", "answers": {"text": ["Ada"], "answer_start": [0]}}, with empty
            lists where the context has no answer, or SQuAD's own JSON. Contexts that are longer
            than sequence_length (default 384, with the question) are read in windows that share
            stride tokens (default 128). Evaluations show SQuAD's exact match and F1.
        ctc (wav2vec2, HuBERT, WavLM): data: files of JSON lines such as {"audio": "clips/1.wav",
            "text": "what is said"} (or file_name; another key of the text: task_args.text); names
            are relative to the file's folder, and recordings have 16,000 samples a second. The
            characters of the texts become the vocabulary, unless the folder has a vocab.json. No
            layer is skipped at random (layerdrop 0). Evaluations show the word error rate and the
            character error rate.
        speech_seq2seq (Whisper): data as for ctc; tokenizer and sequence_length (default 448) of
            the texts. Evaluations show the accuracy of each token after the right ones.
        image_text (CLIP): data: files of JSON lines such as {"image": "pictures/1.jpg", "text":
            "what it shows"}; tokenizer, and sequence_length (default 77) of the texts. The loss is
            that of the global batch on every layout. Evaluations show how often a picture's own
            text, and a text's own picture, is the nearest in a batch of train.eval_batch_size.
        image_text_to_text (LLaVA): data: files of JSON lines such as {"image": "pictures/1.jpg",
            "messages": [{"role": "user", "content": "<image> What is it?"}, {"role": "assistant",
            "content": "…"}]}, or with `conversations` as LLaVA's own data, or with `prompt` and
            `answer`; tokenizer and chat template as for instructions; sequence_length (default
            2048), the picture's tokens among them. The loss is over the assistant's messages.
            Evaluations show the accuracy of each token after the right ones.
        semantic_segmentation (SegFormer, BEiT): data: a folder with images/ and masks/ of the same
            names, masks as .png of a class for each pixel (255: none), or files of JSON lines such
            as {"image": "images/1.jpg", "mask": "masks/1.png"}; image_size: the side of the squares
            that pictures become (default: the model's, or 512). Evaluations show the accuracy of
            pixels and the mean IoU.
        image_classification: data and augment_shift as for image_classification. A model type gets
            the images' size and channels; with a folder or a hub id images are resized to what its
            configuration says.
    """

    def __init__(
        self,
        *,
        model: str,
        data: str | list[str],
        config: dict[str, Any] | None = None,
        kind: str = "auto",
        pretrained: bool = False,
        lora: dict[str, Any] | None = None,
        freeze: list[str] | None = None,
        attention: str | None = None,
        tokenizer: str | None = None,
        token_dtype: str | None = None,
        sequence_length: int | None = None,
        text: str | None = None,
        label: str | None = None,
        mask_fraction: float | None = None,
        stride: int | None = None,
        image_size: int | None = None,
        augment_shift: int | None = None,
        dpo: dict[str, Any] | None = None,
        eval_samples: int | None = None,
    ) -> None:
        one_of("kind", kind, ("auto", *KINDS))
        if not isinstance(pretrained, bool):
            raise UserError(f"task_args.pretrained is {pretrained!r}; it must be true or false")
        if config is not None and not isinstance(config, Mapping):
            raise UserError(f"task_args.config is {config!r}; it must be a mapping of key to value")
        written = dict(config or {})
        self.source = find_model(model, weights=pretrained)
        kind_class = choose(self.source, kind)
        self.kind = kind_class.name
        options = self._options_of_kind(
            {
                "tokenizer": tokenizer,
                "token_dtype": token_dtype,
                "sequence_length": sequence_length,
                "text": text,
                "label": label,
                "mask_fraction": mask_fraction,
                "stride": stride,
                "image_size": image_size,
                "augment_shift": augment_shift,
                "dpo": dpo,
            }
        )
        recipe = self._recipe_of(
            kind_class,
            written=written,
            pretrained=pretrained,
            lora=lora,
            freeze=freeze,
            attention=attention,
        )
        settings = Settings(
            source=self.source, base=recipe.config, data=data, eval_samples=eval_samples
        )
        if kind_class.default_length is not None:
            settings = self._with_texts(
                settings,
                kind_class,
                tokenizer=options.pop("tokenizer", None),
                pretrained=pretrained,
                sequence_length=options.pop("sequence_length", None),
                vocab_size_is_written="vocab_size" in kind_class.of_texts(written),
            )
        self._take(kind_class(settings, **options))  # type: ignore[call-arg]
        self.config = resolve_config(self.source, derived=self._data.config_keys, written=written)
        self.recipe = replace(recipe, config=self.config)
        self._prepare_model()

    def _recipe_of(
        self,
        kind: type[Kind],
        *,
        written: Mapping[str, Any],
        pretrained: bool,
        lora: dict[str, Any] | None,
        freeze: list[str] | None,
        attention: str | None,
    ) -> Recipe:
        """How the model is built, as far as that is known without the data.

        Mistakes in its arguments are therefore reported before the data is read.

        Args:
            kind: The kind of model.
            written: `task_args.config`.
            pretrained: `task_args.pretrained`.
            lora: `task_args.lora`.
            freeze: `task_args.freeze`.
            attention: `task_args.attention`.

        Raises:
            UserError: One of them cannot be used.
        """
        folder = self.source.folder if pretrained else None
        adapters: Any = None
        if lora is not None:
            adapters = lora_options.adapter_config(lora, kind.adapter_type, folder)
        return Recipe(
            model_class=kind.model_class,
            config=resolve_config(self.source, derived={}, written=written),
            folder=folder,
            may_have_new_head=kind.may_have_new_head,
            attention=attention,
            adapters=adapters,
            quantize=lora_options.quantize_method(lora),
            quantize_layers=lora_options.quantized_layers(lora),
            untrained=_names_of_parts(freeze),
        )

    def _take(self, data: Kind) -> None:
        """Take the data of the model's kind, and what the loop asks of a task from it."""
        self._data = data
        self._train = data.train_data()
        self._eval = data.eval_data()
        self.tokenizer = data.tokenizer
        if data.sequence_length is not None:
            self.sequence_length = data.sequence_length
        self.tokens_per_sample = data.tokens_per_sample
        self.unit = data.unit
        self.float_output = data.float_output
        self.compiles_loss = data.compiles_loss
        self.gathers = data.gathers

    def _options_of_kind(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Those of some arguments that are written.

        Raises:
            UserError: One is for other kinds of models.
        """
        written = {name: value for name, value in arguments.items() if value is not None}
        for name in written:
            if name not in KINDS[self.kind].options:
                kinds = " and ".join(takers(name))
                raise UserError(
                    f"task_args.{name} is for {kinds}, but this model is for {self.kind}; "
                    "leave it out"
                )
        return written

    def _with_texts(
        self,
        settings: Settings,
        kind: type[Kind],
        *,
        tokenizer: str | None,
        pretrained: bool,
        sequence_length: int | None,
        vocab_size_is_written: bool,
    ) -> Settings:
        """The settings with what a model of texts depends on.

        Args:
            settings: What does not depend on texts.
            kind: The kind of model.
            tokenizer: `task_args.tokenizer`.
            pretrained: Whether training starts from the folder's weights.
            sequence_length: `task_args.sequence_length`.
            vocab_size_is_written: Whether `task_args.config` has the size of the vocabulary.
        """
        path = choose_tokenizer(self.source, tokenizer, pretrained=pretrained)
        opened = kind.open_tokenizer(self.source, path)
        has_vocab_size = self.source.folder is not None or vocab_size_is_written
        vocab_size = int(kind.of_texts(settings.base).vocab_size)
        return replace(
            settings,
            vocab_size=vocab_size if has_vocab_size else None,
            tokenizer_path=path,
            tokenizer=opened,
            sequence_length=_length(kind, sequence_length, settings.base),
        )

    def _prepare_model(self) -> None:
        """Decide, from the model's structure, how the recipe's model is built and called.

        Raises:
            UserError: The configuration does not make a model, or one that the data does not fit.
        """
        structure = self.structure()
        _require_parts(structure, self.recipe.untrained)
        # Training has no use for keys and values that are kept for the next token.
        self._data.keywords = dict.fromkeys(accepted(["use_cache"], structure), False)
        self._data.prepare(structure, attends_fully=self._attends_fully())
        untrained = (*self.recipe.untrained, *self._data.untrained)
        self.recipe = replace(self.recipe, untrained=untrained)
        self._build = self.recipe.build
        # Rows of one text need no mask.
        can_be_unmasked = self._data.rows == UNPADDED and takes_registered_attention(structure)
        if can_be_unmasked and self._attends_fully():
            self._build = replace(self.recipe, attention=unmasked_attention()).build
        self._add_balance_loss(structure)
        of_texts = self._data.of_texts(self.config)
        self._heads = plan.heads(of_texts, self.tensor_plan(structure))

    def _attends_fully(self) -> bool:
        """Whether every layer attends to all earlier tokens."""
        if self._data.rows not in (UNPADDED, PACKED):
            return False
        try:
            plan.require_full_attention(self.config, self.sequence_length)
        except UserError:
            return False
        return True

    def _add_balance_loss(self, structure: PreTrainedModel) -> None:
        """If the configuration asks for it, train the balance of mixtures of experts.

        Raises:
            UserError: The balance of a mixture cannot be computed.
        """
        is_wanted = getattr(self.config, "output_router_logits", False)
        mixtures = find_mixtures(structure) if is_wanted else []
        self._balanced_layers = len(mixtures)
        if mixtures:
            self._experts = mixtures[0].count
            balance.sum_over_layers(lambda: structure)  # to find out here whether that is possible
            self._build = partial(balance.sum_over_layers, self._build)

    # --- the task ---

    def build_trained(self) -> nn.Module:
        """The model with the library's attention, which takes masks: people's rows are padded."""
        return self.recipe.build()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of the data's task, and the balance of experts if that is trained."""
        answering_model = self._answering_model(model)
        if not self._balanced_layers:
            return self._data.loss(answering_model, batch)
        tokens = tensors(batch)[0]
        sequences = tokens.numel() // tokens.size(-1)
        weight = float(getattr(self.config, "router_aux_loss_coef", 0.0))
        with balance.summed(sequences, self._experts, tokens.device):
            loss = self._data.loss(answering_model, batch)
            return loss + weight * balance.balance_loss(self._balanced_layers)

    @property
    def items(self) -> Callable[[Batch], int | Tensor]:  # type: ignore[override]
        """The data's own method, which knows what the loss is the mean of."""
        return self._data.items

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The metrics of the data's task."""
        return self._data.metrics(self._answering_model(model), batch)

    def reference(self, model: nn.Module, batch: Batch) -> Tensor:
        """What the data's task needs to know of the model before the first step."""
        return self._data.reference(self._answering_model(model), batch)

    def _answering_model(self, model: nn.Module) -> nn.Module:
        """The model as the data's task calls one, which does nothing but call it."""
        self._data.recorded = self.recorded
        self._data.gathering = self.gathering
        return cast(nn.Module, AnsweringModel(self, model))

    def on_evaluation(self, model: nn.Module, log: EvaluationLog) -> None:
        """Log what the model answers."""
        self._data.log_example(self, model, log)

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """The further metrics of the data's task."""
        return self._data.derived(means)

    def arguments(self, inputs: Any) -> dict[str, Any]:
        """The model's arguments.

        Args:
            inputs: The inputs of a batch.
        """
        return self._data.arguments(inputs)

    def answer(self, output: Any) -> Any:
        """What the loss and the metrics need of the model's output."""
        return self._data.answer(output)

    def preprocessor(self) -> Preprocessor | None:
        """What makes the model's arguments of images, texts or questions."""
        return self._data.model_input(self.config)

    def blocks(self, model: nn.Module) -> list[str] | None:
        """The names of the model's layers, but for those whose outputs nothing reads."""
        names = plan.blocks(model)
        unread = self._data.untrained
        if names is None or not unread:
            return names
        return [name for name in names if not any(part.startswith(f"{name}.") for part in unread)]

    def tensor_plan(self, model: nn.Module) -> dict[str, str] | None:
        """The library's plan, and that of adapters.

        It is None, so that every layer is gathered, where adapters read whole matrices (DoRA), are
        beside layers that are not linear, or beside matrices of a few bits.
        """
        parallel_head = self._data.has_parallel_head
        adapters = self.recipe.adapters
        if adapters is None:
            return plan.tensor_plan(model, parallel_head=parallel_head)
        adapted = lora_options.adapted_layers(model)
        if adapted is None or adapters.use_dora or self.recipe.quantize is not None:
            return None
        bare = lora_options.without_adapters(model, adapted)
        library_plan = plan.tensor_plan(bare, parallel_head=parallel_head)
        return None if library_plan is None else plan.with_adapters(library_plan, adapted)

    def context_plan(self, model: nn.Module) -> ContextPlan | None:
        """How the model is given the positions of its tokens.

        Raises:
            UserError: The model is not a causal one that attends to all earlier tokens.
        """
        if not self._data.splits_sequence:
            kinds = " and ".join(name for name, kind in KINDS.items() if kind.splits_sequence)
            raise UserError(
                f"parallel.cp splits the sequences of {kinds}, but this model is for {self.kind}"
            )
        plan.require_full_attention(self.config, self.sequence_length)

        def keywords(positions_1T: Tensor) -> dict[str, Any]:
            # Without a mask the library would take positions that jump for several sequences.
            mask_1T = positions_1T.new_ones(1, positions_1T.size(1))
            return {"position_ids": positions_1T, "attention_mask": mask_1T}

        return self._data.split_context(ContextPlan(keywords))

    def heads(self) -> int | None:
        """The number that the degree of tensor parallelism must divide."""
        return self._heads

    # --- for the export ---

    def structure(self) -> PreTrainedModel:
        """The model on the meta device."""
        return meta_model(self.recipe)

    def with_fused_attention(self) -> tuple[str, HuggingFace] | None:
        """The task with the library's FlexAttention, if its choice keeps scores in memory."""
        recipe = with_fused_attention(self.recipe)
        if recipe is None:
            return None
        task = copy.copy(self)
        task.recipe = recipe
        task._prepare_model()
        return f"task_args.attention={recipe.attention}", task

    def write_folder(self, folder: Path) -> None:
        """Write the files of a transformers model but for its weights.

        They are config.json, and what the model has of a tokenizer, a generation configuration and
        an image processor.
        """
        config = type(self.config).from_dict({**self.config.to_dict(), "dtype": "float32"})
        config.architectures = [type(self.structure()).__name__]
        config.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        if self.source.folder is not None:
            generation = self.source.folder / GENERATION
            if generation.is_file():
                shutil.copyfile(generation, folder / GENERATION)
        self._data.write_files(folder)


class AnsweringModel:
    """A function from the inputs of a batch to what the kind takes as a model's answer.

    Args:
        task: The task, which knows the model's arguments.
        model: The model.
    """

    def __init__(self, task: HuggingFace, model: nn.Module) -> None:
        self.task = task
        self.model = model

    def __call__(self, inputs: Any) -> Any:
        return self.task.answer(self.model(**self.task.arguments(inputs)))


def _names_of_parts(freeze: Any) -> tuple[str, ...]:
    """`task_args.freeze`.

    Raises:
        UserError: It is no list of names.
    """
    names = [] if freeze is None else freeze
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise UserError(
            f"task_args.freeze is {freeze!r}; write a list of names such as [vision_tower]"
        )
    return tuple(names)


def _require_parts(structure: nn.Module, parts: tuple[str, ...]) -> None:
    """Check that a model has the parts that are to stay as they are.

    Raises:
        UserError: It does not have one.
    """
    names = [name for name, _ in structure.named_parameters()]
    for part in parts:
        if not any(is_part(name, part) for name in names):
            modules = {component for name in names for component in name.split(".")[:-1]}
            raise UserError(
                f"task_args.freeze: the model has no part {part!r}{nearest(part, modules)}; the "
                f"first of its parameters is {names[0]}"
            )


def _length(kind: type[Kind], written: int | None, base: PreTrainedConfig) -> int:
    """The tokens of a sample: as written, else the kind's default, or what the model can.

    Args:
        kind: The kind of model.
        written: `task_args.sequence_length`.
        base: The model's configuration before the data is read.

    Raises:
        UserError: The model has fewer positions than are written.
    """
    untrained = meta_model(Recipe(model_class=kind.model_class, config=base, folder=None))
    positions = min(position_limits(untrained), default=None)
    if written is None:
        limits = (
            kind.default_length,
            positions,
            getattr(kind.of_texts(base), "max_position_embeddings", None),
        )
        return min(limit for limit in limits if isinstance(limit, int) and limit > 0)
    whole_number("sequence_length", written)
    if positions is not None and written > positions:
        raise UserError(
            f"task_args.sequence_length is {written}, but the model has {positions} positions; "
            f"write at most {positions}, or a larger task_args.config.max_position_embeddings"
        )
    return written
