// Which layers of a model how many nodes hold. Pure.

import { range } from "./format";
import type { Span, SwarmModel, SwarmNode } from "./types";

/** Of one layer: held by none, by one node alone, by one and a spare that could take it, by two or more. */
export type Backing = "none" | "once" | "backed" | "good";

export interface Held {
  node: SwarmNode;
  span: Span;
}

/** Every span of this model. */
export function spansOf(model: SwarmModel, nodes: SwarmNode[]): Held[] {
  return nodes.flatMap((node) =>
    node.spans.filter((span) => span.model_id === model.id && span.precision === model.precision).map((span) => ({ node, span })),
  );
}

/** For each layer how it is held. */
export function backing(model: SwarmModel, nodes: SwarmNode[]): Backing[] {
  const spares = spansOf(model, nodes).filter(({ span }) => span.state === "spare");
  return model.coverage.map((held, layer) => {
    const backed = spares.filter(({ span }) => has(span, layer)).length;
    return held + backed === 0 ? "none" : held + backed === 1 ? "once" : held === 1 ? "backed" : "good";
  });
}

/** The layers of one kind, ascending. */
export function layersOf(kinds: Backing[], kind: Backing): number[] {
  return kinds.flatMap((one, layer) => (one === kind ? [layer] : []));
}

export function has(span: Span, layer: number): boolean {
  const [start, end] = range(span.layers);
  return start <= layer && layer < end;
}
